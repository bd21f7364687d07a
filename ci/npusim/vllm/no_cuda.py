"""Give a torch that is built for CUDA the libraries of CUDA that it names, in which every function says: no device.

``python no_cuda.py TORCH``, the folder of the package. PyPI has torch 2.10 for x86-64 with CUDA only, and the libraries
behind it are 2.7 GB; without a GPU torch asks them for the number of devices, and for nothing else.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice
OF_CUDA = re.compile(r"(lib(?:cu(?!da\.)|nccl|nvshmem)[\w]*\.so\.\d+)")


def main(torch: Path) -> None:
    """Write the libraries beside torch's own."""
    own = sorted(path for path in torch.joinpath("lib").glob("*.so") if path.resolve().parent.name == "lib")
    wanted = sorted({soname for path in own for soname in OF_CUDA.findall(output("readelf", "-d", path))})
    functions: dict[str, set[str]] = defaultdict(set)  # by version; CUDA's versions are the libraries' names
    for line in output("nm", "-D", "--undefined-only", *own).splitlines():
        name, _, version = line.split()[-1].partition("@") if line.split() else ("", "", "")
        if re.match("_*(cu|nccl|nvshmem)", name):
            functions[version].add(name)
    for soname in wanted:
        versions = [soname] if soname in functions else ["NVSHMEM"] if "nvshmem" in soname else [""]
        build(torch / "lib" / soname, {version: functions[version] for version in versions})


def build(library: Path, functions: dict[str, set[str]]) -> None:
    """Write ``library`` with ``functions``, the names of each version."""
    names = sorted(set().union(*functions.values()))
    code = "".join(map(function, names)) or "int nothing;\n"
    versions = "".join(f"{version} {{ global: *; }};\n" for version in functions if version)
    script = library.with_suffix(".map")
    script.write_text(versions or "{ global: *; };\n")
    command = ["gcc", "-x", "c", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    command += [f"-Wl,--version-script={script}", "-o", str(library), "-"]
    subprocess.run(command, input=code, text=True, check=True)
    script.unlink()


def function(name: str) -> str:
    """Return the function in C. torch prints what the functions for errors return."""
    if re.search("Error(String|Name)$|LastError$", name) and not name.startswith(("cudaGetLast", "cudaPeek")):
        return f'const char *{name}(void) {{ return "there is no CUDA here, only the names of its functions"; }}\n'
    return f"int {name}(void) {{ return {NO_DEVICE}; }}\n"


def output(*command: str | Path) -> str:
    """Return what the command writes."""
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
