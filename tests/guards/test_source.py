"""The house rules that a program can check. Each test lists every place that breaks its rule."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.sources import ALL, CORE, REPO, SHIPPED, comments, imports, place, tree

DEVICE_WORD = re.compile(
    "cuda|nccl|cudnn|nvidia|nvtx|gpu|npu|hccl|cann|ascend|huawei|davinci|rocm|rccl|hip|amd|intel|xpu|xccl|mps|mlu"
    "|cambricon|hpu|gaudi|habana|musa|tpu|gloo"
)
LAYERS = [  # an arrow may point to the left, or to another part of the same layer that does not point back
    {"errors", "children", "clock", "environ", "files", "hub", "lazy", "output", "user_code"},
    {"interfaces"},
    {"discovery"},
    {"comm", "memory"},
    {"weights"},
    {"checkpoint", "rollout", "train", "models", "model_files", "saved_names", "safetensors_files", "lora"},
    {"run"},
    {"testing"},
    {"cli"},
]
LAYER_OF = {unit: number for number, units in enumerate(LAYERS) for unit in units}
MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 500
MAX_BROAD_EXCEPTS_PER_1000_LINES = 4


# -- no device's name in the core -----------------------------------------------------------------------------------


def device_words(line: str) -> set[str]:
    """Return the device and vendor names in ``line``, in any spelling: ``NPUBackend`` and ``torch_npu`` have one."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", line)
    return {word for word in words if DEVICE_WORD.fullmatch(word.lower())}


@pytest.mark.parametrize("line", ["torch.cuda.Stream()", "class NPUBackend:", "# on Cuda", "torch_npu", "use_NCCL"])
def test_the_search_for_device_names_finds_them(line: str) -> None:
    assert device_words(line)


@pytest.mark.parametrize("line", ["input", "in ascending order", "descending", "amdahl", "tmps", "on the cpu"])
def test_the_search_for_device_names_finds_nothing_else(line: str) -> None:
    assert not device_words(line)


def test_the_core_names_no_device() -> None:
    found = [
        f"{place(path, number)} {sorted(device_words(line))}"
        for path in CORE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if device_words(line)
    ]
    assert not found, "ask for a Capability, or use a method of Backend"


def test_only_one_module_takes_what_vendors_replace_in_torch() -> None:
    """An engine in the same process may have put another class at ``torch.Event``."""
    found = [
        place(path, node.lineno)
        for path in SHIPPED
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.Event", "torch.Stream")
        if path.name != "overhead.py"  # it compares hwrl's calls with these
    ]
    assert not found, "take them from Backend, which takes them from hwrl/interfaces/torchapi.py"


def compares_a_name(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    names = [side for side in sides if isinstance(side, ast.Attribute) and side.attr == "name"]
    return bool(names) and any(isinstance(side, ast.Constant) and side.value == "cpu" for side in sides)


def test_the_core_compares_no_backends_name() -> None:
    found = [
        place(path, node.lineno)
        for path in CORE
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Compare) and compares_a_name(node)
    ]
    assert not found, "ask for a Capability"


# -- arrows point down ----------------------------------------------------------------------------------------------


def unit_of(path: Path) -> str:
    return path.relative_to(REPO / "hwrl").parts[0].removesuffix(".py")


@cache
def arrows() -> set[tuple[str, str]]:
    """Return every pair (part of hwrl, part that it imports), except for the package's own table of names."""
    pairs = {(unit_of(path), name.split(".")[1]) for path in CORE for name in imports(path) if name.startswith("hwrl.")}
    return {(unit, other) for unit, other in pairs if unit not in (other, "__init__", "__main__") and other in LAYER_OF}


def test_every_part_has_its_layer() -> None:
    assert {unit_of(path) for path in CORE} - {"__init__", "__main__"} <= set(LAYER_OF), (
        "give the new part its place in LAYERS"
    )


def test_the_page_on_design_shows_the_layers() -> None:
    rows = re.findall(r"^\| \w[\w ]* \| (`hwrl\.[^|]*) \|", (REPO / "docs/design.md").read_text(), re.MULTILINE)
    shown = [set(re.findall(r"`hwrl\.(\w+)`", row)) for row in rows]
    assert shown == LAYERS[::-1]


def test_arrows_point_down() -> None:
    assert not [(unit, other) for unit, other in arrows() if LAYER_OF[other] > LAYER_OF[unit]]


def test_no_two_parts_import_each_other() -> None:
    assert not [(unit, other) for unit, other in arrows() if (other, unit) in arrows()]


def test_interfaces_import_only_errors() -> None:
    assert {other for unit, other in arrows() if unit == "interfaces"} == {"errors"}


def test_only_comm_names_the_stores_of_torch() -> None:
    found = {path for path in ALL for name in imports(path) if name.startswith("torch._C._distributed_c10d")}
    assert found <= {*(REPO / "hwrl/comm").glob("*.py"), REPO / "hwrl/interfaces/backend.py"}, "import from hwrl.comm"


def test_the_core_imports_no_backend_and_no_plugin() -> None:
    assert not [(str(path), name) for path in CORE for name in imports(path) if name.startswith("hwrl_")]


# -- no code from a model directory ---------------------------------------------------------------------------------


def auto_calls(path: Path) -> Iterator[ast.Call]:
    """Yield the calls of transformers' Auto classes, which run a directory's own code if they may."""
    for node in ast.walk(tree(path)):
        called = node.func if isinstance(node, ast.Call) else None
        owner = ast.unparse(called.value) if isinstance(called, ast.Attribute) else ""
        if isinstance(node, ast.Call) and owner.rpartition(".")[2].startswith("Auto"):
            yield node


def test_no_loader_runs_code_from_a_model_directory_or_asks_for_it() -> None:
    calls = [(place(path, call.lineno), call) for path in SHIPPED for call in auto_calls(path)]
    assert len(calls) >= 4, "the search finds them"
    refusing = [where for where, call in calls if "trust_remote_code=False" in map(ast.unparse, call.keywords)]
    assert refusing == [where for where, _ in calls], "pass trust_remote_code=False"


# -- size and names -------------------------------------------------------------------------------------------------


def test_functions_are_short() -> None:
    found = [
        f"{place(path, node.lineno)} {node.name}: {1 + (node.end_lineno or 0) - node.lineno} lines"
        for path in ALL
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert not found


def test_files_are_short() -> None:
    assert not [str(path) for path in ALL if len(path.read_text().splitlines()) > MAX_FILE_LINES]


def test_no_file_is_a_drawer_for_everything() -> None:
    assert not [str(path) for path in ALL if path.stem in {"utils", "helpers", "common", "misc"}]


# -- exceptions from the rules --------------------------------------------------------------------------------------


def test_every_silenced_check_has_a_code_and_a_reason() -> None:
    good = r"# noqa: [A-Z]+[0-9]+(, [A-Z]+[0-9]+)* - \w.*|# type: ignore\[[\w, -]+\] +# \w.*"
    found = [
        f"{place(path, number)} {comment}"
        for path in ALL
        for number, comment in comments(path)
        if re.match(r"#\s*(noqa|type:\s*ignore)", comment) and not re.fullmatch(good, comment)
    ]
    assert not found


def test_broad_excepts_are_few() -> None:
    found = [place(path, number) for path in SHIPPED for number, text in comments(path) if "noqa: BLE001" in text]
    nlines = sum(len(path.read_text().splitlines()) for path in SHIPPED)
    assert len(found) <= MAX_BROAD_EXCEPTS_PER_1000_LINES * nlines / 1000, found
