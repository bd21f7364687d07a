"""Nothing from a network or a checkpoint is unpickled: each unpickling call is listed here, with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.sources import SHIPPED, place, tree

_UNPICKLES = {"loads", "load", "Unpickler", "unsafe_load", "full_load"}
_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "joblib", "jsonpickle", "ForkingPickler"}
_COLLECTIVES = {
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "recv_object_list",
    "gather_for_metrics",
}  # fmt: skip
_ALLOWED = {
    "hwrl/rollout/reward_process.py": "a reward process reads the pipe of its parent, a socket pair without a name",
    "hwrl/rollout/reward_loop.py": "a reward process reads the pipe of its parent, a socket pair without a name",
    "hwrl/run/first_import.py": "the user's own code and its parent exchange values through a pipe without a name",
    "hwrl/testing/processes.py": "a check and its own child processes exchange values through pipes without a name",
    "hwrl/run/config/yaml_reader.py": "the loader is a subclass of yaml.SafeLoader; the file is the user's",
    "plugins/hwrl_vllm/worker.py": "an engine calls its own worker processes through vLLM, which pickles calls itself",
    "plugins/hwrl_bench/vllm_ways.py": "likewise, in a comparison of ways to load weights",
    "plugins/hwrl_bench/checkpoint_process.py": "a benchmark and its child process speak through a pipe without a name",
    "plugins/hwrl_trl/checkpoints.py": "ranks of the user's own group; accelerate itself meets them this way",
}


def _calls(source: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each call that may unpickle, and of each import that would hide one."""
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from ((node.lineno, name) for name in _hidden(node))
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        module, _, method = name.rpartition(".")
        options = {option.arg: ast.unparse(option.value) for option in node.keywords}
        unpickles = module.rpartition(".")[2] in _MODULES and method in _UNPICKLES
        unpickles |= method == "recv" and not (node.args or node.keywords)  # a multiprocessing.Connection
        unpickles |= name == "torch.load" and options.get("weights_only") != "True"
        unpickles |= method in {"load", "fromfile"} and options.get("allow_pickle") not in {None, "False"}
        if unpickles or method in _COLLECTIVES:
            yield node.lineno, name


def _hidden(node: ast.ImportFrom | ast.Import) -> list[str]:
    """Return the names that ``node`` imports and that :func:`_calls` would not know."""
    if isinstance(node, ast.Import):
        return [one.name for one in node.names if one.name in _MODULES and one.asname not in {None, one.name}]
    names = [one for one in node.names if node.module in _MODULES and one.name in _UNPICKLES]
    return [one.name for one in (*names, *(each for each in node.names if each.name in _MODULES and each.asname))]


@pytest.mark.parametrize(
    "line",
    [
        "pickle.loads(data)",
        "connection.recv()",
        "reduction.ForkingPickler.loads(data)",
        "from pickle import loads",
        "from pickle import loads as load",
        "import pickle as p",
        "from multiprocessing.reduction import ForkingPickler as P",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "dist.all_gather_object(out, value)",
        "broadcast_object_list(values)",
        "yaml.load(text, Loader)",
    ],
)
def test_the_search_finds_what_unpickles(line: str) -> None:
    assert list(_calls(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    ["torch.load(path, weights_only=True)", "json.loads(data)", "np.load(path)", "socket.recv(9)", "import pickle"],
)
def test_the_search_finds_nothing_else(line: str) -> None:
    assert not list(_calls(ast.parse(line)))


def test_nothing_from_outside_is_unpickled() -> None:
    found = {place(path, line): name for path in SHIPPED for line, name in _calls(tree(path))}
    files = {where.rpartition(":")[0] for where in found}
    unknown = {where: name for where, name in found.items() if where.rpartition(":")[0] not in _ALLOWED}
    assert not unknown, "send JSON or tensors; or say in this test where the bytes come from"
    assert files == _ALLOWED.keys(), "the list names files without such a call"
