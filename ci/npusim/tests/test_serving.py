"""Operators of an inference engine, beside what torch computes on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch_npu


def test_attention_over_a_paged_cache_equals_torchs() -> None:
    """Two sequences, of 5 and 3 keys, in scattered blocks; the queries are their last 2 and their last one."""
    torch.manual_seed(0)
    heads, key_heads, size, block, blocks = 4, 2, 16, 4, 6
    lengths, counts, table = [5, 3], [2, 1], torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
    query = torch.randn(sum(counts), heads, size, dtype=torch.bfloat16)
    keys, values = (torch.randn(sum(lengths), key_heads, size, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.tensor(
        [int(table[i, j // block]) * block + j % block for i, n in enumerate(lengths) for j in range(n)]
    )
    caches = [torch.zeros(blocks, block, key_heads, size, dtype=torch.bfloat16, device="npu") for _ in range(2)]
    torch_npu.npu_scatter_pa_kv_cache(
        key=keys.npu(),
        value=values.npu(),
        key_cache=caches[0],
        value_cache=caches[1],
        slot_mapping=slots.int().npu(),
        cache_mode="Norm",
    )
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query=query.npu(),
        key=caches[0].view(blocks, block, -1),
        value=caches[1].view(blocks, block, -1),
        block_table=table.npu(),
        block_size=block,
        input_layout="TND",
        atten_mask=torch.ones(2048, 2048, dtype=torch.int8).triu(1).npu(),
        actual_seq_lengths=[2, 3],
        actual_seq_lengths_kv=lengths,
        num_heads=heads,
        num_key_value_heads=key_heads,
        scale=0.25,
        sparse_mode=3,
    )
    wanted = []
    for q, k, v in zip(query.split(counts), keys.split(lengths), values.split(lengths), strict=True):
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        wide = [t.float().transpose(0, 1) for t in (q, k, v)]
        wanted += [
            torch.nn.functional.scaled_dot_product_attention(
                *wide, attn_mask=mask, scale=0.25, enable_gqa=True
            ).transpose(0, 1)
        ]
    torch.testing.assert_close(out.cpu().float(), torch.cat(wanted), atol=2e-2, rtol=2e-2)


def test_attention_takes_no_float32() -> None:
    query = torch.randn(1, 2, 16, device="npu")
    with pytest.raises(RuntimeError, match="float16 or bfloat16"):
        torch_npu.npu_fused_infer_attention_score(
            query, query, query, input_layout="TND", actual_seq_lengths=[1], actual_seq_lengths_kv=[1], num_heads=2
        )
        torch.npu.synchronize()


def test_top_k_and_top_p_keep_the_likely_tokens() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.1, 0.4, 0.2, 0.3]]))
    kept = torch_npu.npu_top_k_top_p(
        logits.npu(), p=torch.tensor([0.65, 1.0]).npu(), k=torch.tensor([4, 2], dtype=torch.int32).npu()
    )
    assert torch.isfinite(kept.cpu()).tolist() == [[False, True, False, True], [False, True, False, True]]


def test_tokens_go_to_their_experts_and_back() -> None:
    """The weighted sum of a token's experts, each a matrix."""
    torch.manual_seed(0)
    tokens, experts, weights = (
        torch.randn(5, 4),
        torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]]),
        torch.rand(5, 2),
    )
    matrices = torch.randn(3, 4, 6)
    rows, places, counts, _ = torch_npu.npu_moe_init_routing_v2(
        tokens.npu(),
        experts.int().npu(),
        active_num=10,
        expert_num=3,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, 3],
        quant_mode=-1,
        row_idx_type=0,
    )
    (products,) = torch_npu.npu_grouped_matmul(
        x=[rows], weight=[matrices.npu()], split_item=2, group_list_type=1, group_type=0, group_list=counts
    )
    out = torch_npu.npu_moe_token_unpermute(products, places.abs(), probs=weights.npu())
    wanted = torch.einsum("tk,td,tkdo->to", weights, tokens, matrices[experts])
    torch.testing.assert_close(out.cpu(), wanted, atol=1e-5, rtol=1e-5)


def test_a_slice_is_copied_to_another_device() -> None:
    whole = torch.arange(48.0, device="npu:0").view(6, 8)
    part = torch.empty(6, 3, device="npu:1")
    part.copy_(whole[:, 2:5])
    assert part.cpu().equal(whole.cpu()[:, 2:5])
