"""Where Megatron has each tensor of the model's files. Loading, weight transfer and checkpoints use this one table.

It needs no megatron.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_ROWS, _COLUMNS = 0, 1


@dataclass(frozen=True)
class Layout:
    """The place of ``rank``: ``tensor`` ranks share each layer, ``stages`` ranks have the layers one after the other.

    ``data`` copies of the model are data-parallel; ``experts`` neighbouring copies share the experts. Ranks are in
    Megatron's order: tensor-parallel ranks are neighbours, then come the copies, then the stages.
    """

    rank: int = 0
    tensor: int = 1
    data: int = 1
    stages: int = 1
    experts: int = 1

    @property
    def tensor_rank(self) -> int:
        """The part of each divided tensor that this rank has."""
        return self.rank % self.tensor

    @property
    def expert_rank(self) -> int:
        """The part of the experts that this rank has."""
        return self.rank // self.tensor % self.data % self.experts

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank."""
        return self.rank // (self.tensor * self.data)

    def ranks(self, *, stage: int, expert_rank: int) -> tuple[int, ...]:
        """Return the first set of tensor-parallel ranks that have these layers and experts."""
        first = (stage * self.data + expert_rank) * self.tensor
        return tuple(range(first, first + self.tensor))


@dataclass(frozen=True)
class _Rule:
    """Maps the tensor ``saved`` of the whole model, of a layer or of an expert to Megatron's ``parameter``.

    ``part`` names its part of a parameter with several saved tensors. ``sizes`` names the sizes of its shape. Tensor
    parallelism divides ``dim``. ``packed`` names transformers' tensor with all experts of the layer.
    """

    parameter: str
    saved: str
    sizes: tuple[str, ...]
    dim: int | None = None
    part: str = ""
    packed: str = ""


_EMBEDDING = _Rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", ("vocabulary", "hidden"), _ROWS)
_NORM = _Rule("decoder.final_layernorm.weight", "model.norm.weight", ("hidden",))
_HEAD = _Rule("output_layer.weight", "lm_head.weight", ("vocabulary", "hidden"), _ROWS)
_TIED_HEAD = _Rule("output_layer.weight", "model.embed_tokens.weight", ("vocabulary", "hidden"), _ROWS)

_QKV = "self_attention.linear_qkv"
_ATTENTION = (
    _Rule(f"{_QKV}.weight", "self_attn.q_proj.weight", ("queries", "hidden"), _ROWS, "query"),
    _Rule(f"{_QKV}.weight", "self_attn.k_proj.weight", ("keys", "hidden"), _ROWS, "key"),
    _Rule(f"{_QKV}.weight", "self_attn.v_proj.weight", ("keys", "hidden"), _ROWS, "value"),
    _Rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", ("hidden", "queries"), _COLUMNS),
)
_QKV_BIASES = (
    _Rule(f"{_QKV}.bias", "self_attn.q_proj.bias", ("queries",), _ROWS, "query"),
    _Rule(f"{_QKV}.bias", "self_attn.k_proj.bias", ("keys",), _ROWS, "key"),
    _Rule(f"{_QKV}.bias", "self_attn.v_proj.bias", ("keys",), _ROWS, "value"),
)
_QK_NORMS = (
    _Rule("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", ("head",)),
    _Rule("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", ("head",)),
)
_DENSE = (
    _Rule("mlp.linear_fc1.weight", "mlp.gate_proj.weight", ("inner", "hidden"), _ROWS, "gate"),
    _Rule("mlp.linear_fc1.weight", "mlp.up_proj.weight", ("inner", "hidden"), _ROWS, "up"),
    _Rule("mlp.linear_fc2.weight", "mlp.down_proj.weight", ("hidden", "inner"), _COLUMNS),
)
_ROUTER = (_Rule("mlp.router.weight", "mlp.gate.weight", ("experts", "hidden")),)
_EXPERT = (
    _Rule("linear_fc1.weight", "gate_proj.weight", ("expert", "hidden"), _ROWS, "gate", packed="gate_up_proj"),
    _Rule("linear_fc1.weight", "up_proj.weight", ("expert", "hidden"), _ROWS, "up", packed="gate_up_proj"),
    _Rule("linear_fc2.weight", "down_proj.weight", ("hidden", "expert"), _COLUMNS, packed="down_proj"),
)
_NORMS = (
    _Rule("input_layernorm.weight", "input_layernorm.weight", ("hidden",)),
    _Rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", ("hidden",)),
)


@dataclass(frozen=True)
class SavedTensor:
    """The tensor ``name`` of the model's files, of ``shape`` when whole, and its place in Megatron's model.

    It is ``part`` of ``parameter``, on the stage ``stage`` and the expert rank ``expert_rank``. Tensor parallelism
    divides ``dim``. In transformers' state dict it begins at ``offset`` of the tensor ``own_name`` of ``own_shape``;
    only packed experts have another name there. A ``copy`` is a second place of a tied embedding, on the last stage.
    """

    name: str
    shape: tuple[int, ...]
    parameter: str
    part: str
    dim: int | None
    stage: int
    expert_rank: int
    own_name: str
    own_shape: tuple[int, ...]
    offset: tuple[int, ...]
    copy: bool = False

    def is_on(self, layout: Layout) -> bool:
        """Return whether the rank of ``layout`` has this tensor, or a part of it."""
        return self.stage == layout.stage and self.expert_rank in (_ALL, layout.expert_rank)

    def owners(self, layout: Layout) -> tuple[int, ...]:
        """Return the ranks with its parts, in order; of an undivided tensor the first rank that has it."""
        ranks = layout.ranks(stage=self.stage, expert_rank=max(0, self.expert_rank))
        return ranks if self.dim is not None else ranks[:1]


_ALL = -1
"""The expert rank of tensors that every copy of the model has."""


def saved_tensors(config: Any, layout: Layout) -> Iterator[SavedTensor]:
    """Yield the tensors of the model's files, for its transformers ``config``; the order is the same on all ranks."""
    sizes = _sizes(config)
    layers, last = config.num_hidden_layers, layout.stages - 1
    yield _saved(_EMBEDDING, sizes, stage=0)
    for layer in range(layers):
        stage, local = divmod(layer, layers // layout.stages)
        yield from _layer(config, sizes, layout, f"model.layers.{layer}.", f"decoder.layers.{local}.", stage)
    yield _saved(_NORM, sizes, stage=last)
    if not config.tie_word_embeddings:
        yield _saved(_HEAD, sizes, stage=last)
    elif last:
        yield _saved(_TIED_HEAD, sizes, stage=last, copy=True)


def is_mixture(config: Any) -> bool:
    """Return whether the layers of the model with this transformers ``config`` have experts."""
    return bool(config.model_type == "qwen3_moe")


def head_size(config: Any) -> int:
    """Return the size of an attention head of the model with this transformers ``config``."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rank_nbytes(config: Any, layout: Layout, *, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of a rank in a step, by cause: ``parameters``, ``gradients`` and ``optimizer``.

    The distributed optimizer divides its float32 parameters and moments over the ranks with the same parameters.
    """
    moments = 8 if dtype == torch.float32 else 12  # the optimizer has float32 parameters, unless the model's are
    total = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for saved in saved_tensors(config, layout):
        if not saved.is_on(layout):
            continue
        elements = torch.Size(saved.shape).numel() // (1 if saved.dim is None else layout.tensor)
        copies = layout.data if saved.expert_rank == _ALL else layout.data // layout.experts
        total["parameters"] += elements * dtype.itemsize
        total["gradients"] += elements * 4
        total["optimizer"] += elements * moments // copies
    return total


def _sizes(config: Any) -> dict[str, int]:
    head = head_size(config)
    return {
        "vocabulary": config.vocab_size,
        "hidden": config.hidden_size,
        "head": head,
        "queries": config.num_attention_heads * head,
        "keys": config.num_key_value_heads * head,
        "inner": config.intermediate_size,
        "experts": config.num_experts if is_mixture(config) else 0,
        "expert": config.moe_intermediate_size if is_mixture(config) else 0,
    }


def _layer(
    config: Any, sizes: dict[str, int], layout: Layout, saved: str, megatron: str, stage: int
) -> Iterator[SavedTensor]:
    """Yield the tensors of a layer. ``saved`` is the prefix in the files, ``megatron`` that of the parameters."""
    rules: tuple[_Rule, ...] = _ATTENTION
    rules += _QKV_BIASES if config.model_type == "qwen2" else ()
    rules += _QK_NORMS if config.model_type in ("qwen3", "qwen3_moe") else ()
    rules += _ROUTER if is_mixture(config) else _DENSE
    for rule in rules + _NORMS:
        yield _saved(rule, sizes, stage=stage, saved=saved, megatron=megatron)
    each = sizes["experts"] // layout.experts
    for expert in range(sizes["experts"]):
        rank, local = divmod(expert, each)
        prefix = f"{megatron}mlp.experts.local_experts.{local}."
        for rule in _EXPERT:
            yield _expert(rule, sizes, stage, f"{saved}mlp.experts.", prefix, expert, rank)


def _saved(
    rule: _Rule, sizes: dict[str, int], *, stage: int, saved: str = "", megatron: str = "", copy: bool = False
) -> SavedTensor:
    name, shape = saved + rule.saved, tuple(sizes[size] for size in rule.sizes)
    zeros = (0,) * len(shape)
    parameter = megatron + rule.parameter
    return SavedTensor(name, shape, parameter, rule.part, rule.dim, stage, _ALL, name, shape, zeros, copy)


def _expert(
    rule: _Rule, sizes: dict[str, int], stage: int, saved: str, megatron: str, expert: int, rank: int
) -> SavedTensor:
    """Return the tensor of one expert. In transformers' packed tensor, the rows of up follow those of gate."""
    shape = rows, columns = tuple(sizes[size] for size in rule.sizes)
    fused = rule.packed == "gate_up_proj"
    packed = (sizes["experts"], 2 * rows if fused else rows, columns)
    offset = (expert, rows if rule.part == "up" else 0, 0)
    name = f"{saved}{expert}.{rule.saved}"
    return SavedTensor(
        name, shape, megatron + rule.parameter, rule.part, rule.dim, stage, rank, saved + rule.packed, packed, offset
    )
