// The operators of an inference engine beyond those of training: what writes a paged attention cache, chooses a token, and
// brings tokens to their experts and back. Attention over such a cache is in ops_attention.cpp.
#include "opapi.h"

using namespace npusim;

namespace {

/// Writes each token's rows to its slot of a cache [blocks, slots of a block, heads, size]; a slot below 0 is padding.
void scatter(const Tensor& rows, const Tensor& cache, const Tensor& slots) {
    const auto all = slots.flatten().to(at::kLong).narrow(0, 0, rows.size(0));
    const auto used = at::nonzero(all >= 0).flatten();
    cache.view({-1, rows.size(1), rows.size(2)}).index_copy_(0, all.index_select(0, used), rows.index_select(0, used));
}

/// Keeps the k largest logits of each row, and of these the smallest set whose probabilities sum to p or more.
Tensor top_k_top_p(const Tensor& logits, const Tensor& p, const Tensor& k) {
    auto [sorted, order] = logits.to(at::kFloat).sort(/*stable=*/true, -1, /*descending=*/true);
    if (k.defined()) {
        const auto last = sorted.gather(-1, (k.to(at::kLong).clamp(1, sorted.size(-1)) - 1).unsqueeze(-1));
        sorted = sorted.masked_fill(sorted < last, -INFINITY);
    }
    if (p.defined()) {
        const auto from_here = sorted.softmax(-1).flip(-1).cumsum(-1).flip(-1);  // the probability of this token and all below
        auto dropped = from_here <= 1 - p.to(at::kFloat).unsqueeze(-1);
        dropped.select(-1, 0).fill_(false);
        sorted = sorted.masked_fill(dropped, -INFINITY);
    }
    return at::empty_like(sorted).scatter_(-1, order, sorted);
}

/// The choice of k experts for each row of logits: by all of them, without groups.
struct Gate {
    Tensor weights, experts, scores;

    Gate(const Tensor& x, const Tensor& bias, int64_t k, int64_t norm, bool renormalized, double scale, double epsilon) {
        if (norm != 0 && norm != 1) unsimulated(("aclnnMoeGatingTopK with norm type " + std::to_string(norm)).c_str());
        scores = norm == 0 ? x.to(at::kFloat).softmax(-1) : x.to(at::kFloat).sigmoid();
        experts = std::get<1>((bias.defined() ? scores + bias : scores).topk(k));
        weights = scores.gather(-1, experts);
        if (norm == 1 || renormalized) weights = weights / (weights.sum(-1, /*keepdim=*/true) + epsilon);
        weights = weights * scale;
    }
};

/// Copies of the tokens, one for each of their experts, in the order of the experts.
struct Routing {
    Tensor rows;       // of x, for the copies of the experts from `first` to `last` - 1
    Tensor places;     // for each (token, expert): its copy's place, or -1
    Tensor counts;     // copies of each expert

    Routing(const Tensor& x, const Tensor& experts, int64_t first, int64_t last) {
        const auto flat = experts.flatten().to(at::kLong);
        const auto local = (flat >= first).logical_and(flat < last);
        const auto order = at::where(local, flat, last).argsort(/*stable=*/true, 0, /*descending=*/false);
        const auto used = order.narrow(0, 0, local.sum().item<int64_t>());
        rows = x.index_select(0, used.div(experts.size(1), "floor"));
        places = at::full_like(flat, -1).index_copy_(0, used, at::arange(used.size(0)));
        counts = (flat.masked_select(local) - first).bincount({}, last - first);
    }
};

struct Grouping {
    int64_t split, type, list_type, activation;
};

/// Each expert's rows with its weights: one tensor for all experts, or one for each.
void grouped_matmul(const Tensors& x, const Tensors& weights, const Tensors& biases, const std::vector<Tensors>& quantization, const Tensor& groups,
                    const Grouping& how, const Outs& out) {
    for (const auto& list : quantization)
        if (!list.empty()) unsimulated("aclnnGroupedMatmul with quantization");
    if (x.size() != 1 || out.size() != 1 || how.split < 2 || how.type != 0 || how.list_type > 1 || how.activation != 0)
        unsimulated("aclnnGroupedMatmul of several inputs or outputs, with other groups than rows, or with an activation");
    const auto ends = (how.list_type == 0 ? groups : groups.cumsum(0)).to(at::kLong);
    for (int64_t i = 0, begin = 0; i < ends.size(0); ++i) {
        const int64_t end = ends[i].item<int64_t>();
        const auto weight = weights.size() == 1 ? weights[0][i] : weights.at(i);
        auto rows = x[0].slice(0, begin, end).to(at::kFloat).matmul(weight.to(at::kFloat));
        if (!biases.empty()) rows = rows + (biases.size() == 1 ? biases[0][i] : biases.at(i));
        out[0].slice(0, begin, end).copy_(rows);
        begin = end;
    }
}

}  // namespace

OP(aclnnScatterPaKvCache,
   (Tensor key, Out key_cache, Tensor slots, Tensor value, Out value_cache, Tensor compressed, Tensor offsets, Tensor lengths, Text mode, Text,
    Ints, Ints), {
    if (mode != "Norm" && !mode.empty()) unsimulated(("aclnnScatterPaKvCache with cache mode " + mode).c_str());
    if (compressed.defined() || offsets.defined() || lengths.defined()) unsimulated("aclnnScatterPaKvCache with compression");
    scatter(key, key_cache, slots);
    scatter(value, value_cache, slots);
})

OP(aclnnApplyTopKTopP, (Float logits, Tensor p, Tensor k, Out out), out = top_k_top_p(logits, p, k))

OP(aclnnMoeGatingTopK,
   (Float x, Tensor bias, int64_t k, int64_t, int64_t groups, int64_t, int64_t renorm, int64_t norm, bool, double scale, double epsilon, Out y,
    Out experts, Out scores), {
    if (groups > 1) unsimulated("aclnnMoeGatingTopK with groups of experts");
    const Gate gate(x, bias, k, norm, renorm != 0, scale, epsilon);
    y = gate.weights;
    experts = gate.experts;
    scores = gate.scores;
})

OP(aclnnMoeInitRoutingV3,
   (Tensor x, Tensor experts, Tensor, Tensor, int64_t, int64_t, int64_t, int64_t drop_pad, int64_t count_type, bool, int64_t quant, Ints range,
    int64_t row_type, Out rows, Out places, Out counts, Out), {
    if (drop_pad != 0 || quant != -1 || row_type != 0 || count_type > 1)
        unsimulated("aclnnMoeInitRoutingV3 with a capacity, quantization, scattered rows or pairs as counts");
    const Routing routing(x, experts, range.at(0), range.at(1));
    rows.narrow(0, 0, routing.rows.size(0)).copy_(routing.rows);
    places = routing.places;
    counts = count_type == 1 ? routing.counts : routing.counts.cumsum(0);
})

OP(aclnnMoeTokenUnpermute, (Tensor rows, Tensor places, Tensor weights, bool padded, Ints, Out out), {
    if (padded) unsimulated("aclnnMoeTokenUnpermute of padded tokens");
    const int64_t copies = weights.defined() ? weights.size(1) : places.numel() / out.size(0);
    auto parts = rows.index_select(0, places.flatten().to(at::kLong)).to(at::kFloat).view({out.size(0), copies, rows.size(1)});
    out = weights.defined() ? (parts * weights.unsqueeze(-1)).sum(1) : parts.sum(1);
})

// torch_npu takes the fifth version, and asks whether the fourth exists.
OP(aclnnGroupedMatmulV4,
   (Tensors x, Tensors weights, Tensors biases, Tensors scales, Tensors offsets, Tensors antiquant_scales, Tensors antiquant_offsets,
    Tensors token_scales, Tensor groups, Tensors activations, Tensors activation_scales, Tensors activation_offsets, int64_t split,
    int64_t group_type, int64_t group_list_type, int64_t activation, Outs out, Outs, Outs),
   grouped_matmul(x, weights, biases, {scales, offsets, antiquant_scales, antiquant_offsets, token_scales, activations, activation_scales,
                  activation_offsets}, groups, {split, group_type, group_list_type, activation}, out))
OP(aclnnGroupedMatmulV5,
   (Tensors x, Tensors weights, Tensors biases, Tensors scales, Tensors offsets, Tensors antiquant_scales, Tensors antiquant_offsets,
    Tensors token_scales, Tensor groups, Tensors activations, Tensors activation_scales, Tensors activation_offsets, int64_t split,
    int64_t group_type, int64_t group_list_type, int64_t activation, Ints, Outs out, Outs, Outs),
   grouped_matmul(x, weights, biases, {scales, offsets, antiquant_scales, antiquant_offsets, token_scales, activations, activation_scales,
                  activation_offsets}, groups, {split, group_type, group_list_type, activation}, out))
