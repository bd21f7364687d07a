// The fused operators of language models: attention, norms, rotary embedding, gated activations.
#include "opapi.h"

using namespace npusim;

namespace {

/// Flash attention of one batch of sequences of equal length, in float32.
struct Attention {
    Tensor query, key, value;  // [B, N, S, D]; key and value may have fewer heads, each then serves several of the query's
    Tensor pse;                // added to the scores where defined
    Tensor masked;             // bool, true where a key is not attended to; undefined is none
    Tensor keep;               // the dropout mask over keep_prob; undefined is none
    double scale;
    bool zero_empty_rows;      // a query that attends to nothing gives 0 and not NaN

    static Tensor heads(const Tensor& kv, int64_t count) { return kv.repeat_interleave(count / kv.size(1), 1); }

    Tensor scores() const {
        auto scores = at::matmul(query, heads(key, query.size(1)).transpose(2, 3)) * scale;
        if (pse.defined()) scores = scores + pse.to(at::kFloat);
        return masked.defined() ? scores.masked_fill(masked, -INFINITY) : scores;
    }

    Tensor probabilities(const Tensor& scores) const {
        auto p = at::softmax(scores, -1);
        return zero_empty_rows ? at::nan_to_num(p, 0.0) : p;
    }

    Tensor dropped(const Tensor& p) const { return keep.defined() ? p * keep : p; }

    /// {output, the rows' maxima, the rows' sums of exponentials}
    std::tuple<Tensor, Tensor, Tensor> forward() const {
        const auto s = scores();
        const auto max = s.amax(-1, /*keepdim=*/true);
        return {at::matmul(dropped(probabilities(s)), heads(value, query.size(1))), max, at::exp(s - max).sum(-1, /*keepdim=*/true)};
    }

    /// {of the query, of the key, of the value, of pse}
    std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad) const {
        const auto merge = [&](const Tensor& g) {  // of heads that share a key
            return g.view({g.size(0), key.size(1), -1, g.size(2), g.size(3)}).sum(2);
        };
        const auto p = probabilities(scores());
        const auto dp = dropped(at::matmul(grad, heads(value, query.size(1)).transpose(2, 3)));
        const auto ds = p * (dp - (dp * p).sum(-1, /*keepdim=*/true));
        return {at::matmul(ds, heads(key, query.size(1))) * scale, merge(at::matmul(ds.transpose(2, 3), query)) * scale,
                merge(at::matmul(dropped(p).transpose(2, 3), grad)), ds};
    }
};

/// Between the layout of the interface and [B, N, S, D].
struct Layout {
    Text name;
    int64_t head_dim;

    Tensor split(const Tensor& t) const {
        if (name == "BNSD") return t.to(at::kFloat);
        if (name == "BSND") return t.to(at::kFloat).transpose(1, 2);
        if (name == "BSH") return t.to(at::kFloat).unflatten(2, {-1, head_dim}).transpose(1, 2);
        if (name == "SBH") return t.to(at::kFloat).unflatten(2, {-1, head_dim}).permute({1, 2, 0, 3});
        if (name == "TND") return t.to(at::kFloat).transpose(0, 1).unsqueeze(0);
        unsimulated(("flash attention's layout " + name).c_str());
    }

    Tensor join(const Tensor& t) const {
        if (name == "BNSD") return t;
        if (name == "BSND") return t.transpose(1, 2);
        if (name == "BSH") return t.transpose(1, 2).flatten(2);
        if (name == "SBH") return t.permute({2, 0, 1, 3}).flatten(2);
        return t.squeeze(0).transpose(0, 1);
    }
};

/// What is masked: by the caller's mask, or by the mode's rule, for which the caller's is only a template.
Tensor mask_of(int64_t mode, const Tensor& mask, int64_t queries, int64_t keys, int64_t before, int64_t after) {
    if (mode == 0 || mode == 1) return mask.defined() ? mask.to(at::kBool) : mask;
    const auto distance = at::arange(keys).unsqueeze(0) - at::arange(queries).unsqueeze(1);  // of the key from the query
    if (mode == 2) return distance > 0;
    if (mode == 3) return distance > keys - queries;
    if (mode == 4) return (distance > keys - queries + after).logical_or(distance < keys - queries - before);
    unsimulated(("flash attention's sparse mode " + std::to_string(mode)).c_str());
}

Tensor statistics(const Tensor& rows) { return rows.expand({-1, -1, -1, 8}); }  // the hardware's: eight copies of each

struct Options {
    double scale, keep_prob;
    int64_t before, after, heads;
    Text layout;
    int64_t precision, mode;
};

/// Both for one batch, and for sequences of different length one after the other (TND, with their ends).
void for_each_sequence(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& pse, const Tensor& drop, const Tensor& mask,
                       Ints query_ends, Ints key_ends, const Options& o,
                       const std::function<void(const Attention&, std::function<Tensor(Tensor)> queries, std::function<Tensor(Tensor)> keys)>& run) {
    const bool packed = o.layout == "TND";
    const Layout layout{o.layout, query.dim() == 3 && !packed ? query.size(2) / o.heads : query.size(-1)};
    const Layout value_layout{o.layout, layout.name.size() == 3 && !packed ? value.size(2) / (key.size(2) / layout.head_dim) : value.size(-1)};
    const auto q = layout.split(query), k = layout.split(key), v = value_layout.split(value);
    if (!packed) query_ends = {q.size(2)}, key_ends = {k.size(2)};
    int64_t bit = 0;
    for (size_t i = 0; i < query_ends.size(); ++i) {
        const int64_t q0 = i == 0 ? 0 : query_ends[i - 1], k0 = i == 0 ? 0 : key_ends[i - 1];
        const int64_t queries = query_ends[i] - q0, keys = key_ends[i] - k0;
        const auto of_queries = [=](Tensor t) { return t.narrow(2, q0, queries); };
        const auto of_keys = [=](Tensor t) { return t.narrow(2, k0, keys); };
        Attention attention{of_queries(q), of_keys(k), of_keys(v), pse, mask_of(o.mode, mask, queries, keys, o.before, o.after), {}, o.scale, o.precision == 2};
        if (drop.defined() && drop.numel() > 0) {
            const std::vector<int64_t> shape{q.size(0), q.size(1), queries, keys};
            attention.keep = unpack_bits(drop, bit, shape) / o.keep_prob;
            bit += c10::multiply_integers(shape);
        }
        run(attention, of_queries, of_keys);
    }
}

void flash_forward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& pse, const Tensor& drop, const Tensor& mask,
                   const Ints& query_ends, const Ints& key_ends, const Options& o, const Out& max, const Out& sum, const Out& out) {
    const Layout layout{o.layout, 0};
    std::vector<Tensor> outs, maxima, sums;
    for_each_sequence(query, key, value, pse, drop, mask, query_ends, key_ends, o, [&](const Attention& attention, auto, auto) {
        auto [result, rows_max, rows_sum] = attention.forward();
        outs.push_back(result), maxima.push_back(statistics(rows_max)), sums.push_back(statistics(rows_sum));
    });
    const auto whole = [](const std::vector<Tensor>& parts) { return at::cat(parts, 2); };
    out = layout.join(whole(outs));
    const Layout rows{o.layout == "TND" ? "TND" : "BNSD", 0};
    max = rows.join(whole(maxima));
    sum = rows.join(whole(sums));
}

void flash_backward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& grad, const Tensor& pse, const Tensor& drop,
                    const Tensor& mask, const Ints& query_ends, const Ints& key_ends, const Options& o, const Out& dq, const Out& dk,
                    const Out& dv, const Out& dpse) {
    const Layout layout{o.layout, o.layout.size() == 3 && o.layout != "TND" ? grad.size(2) / o.heads : 0};
    const auto g = layout.split(grad);
    std::vector<Tensor> of_q, of_k, of_v;
    for_each_sequence(query, key, value, pse, drop, mask, query_ends, key_ends, o, [&](const Attention& attention, auto queries, auto) {
        auto [q, k, v, p] = attention.backward(queries(g));
        of_q.push_back(q), of_k.push_back(k), of_v.push_back(v);
        if (pse.defined()) dpse = p.sum_to_size(pse.sizes());
    });
    dq = layout.join(at::cat(of_q, 2));
    dk = layout.join(at::cat(of_k, 2));
    dv = layout.join(at::cat(of_v, 2));
}

/// Attention of an inference engine: sequences one after the other (TND), each over its keys in a paged cache (a block
/// table, and each sequence's length) or beside it (their ends).
void infer(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, const Ints& query_ends, const Ints& lengths,
           const Tensor& blocks, int64_t heads, const Options& o, const Out& out) {
    if (o.layout != "TND") unsimulated(("aclnnFusedInferAttentionScore with the layout " + o.layout).c_str());
    const auto rows = [&](const Tensor& cache, int64_t i) -> Tensor {  // [N, S, D]
        const int64_t begin = i == 0 || blocks.defined() ? 0 : lengths[i - 1];
        if (!blocks.defined()) return cache.slice(0, begin, lengths[i]).transpose(0, 1);
        const int64_t slots = cache.size(1), used = (lengths[i] + slots - 1) / slots;
        const auto pages = cache.index_select(0, blocks[i].narrow(0, 0, used).to(at::kLong)).flatten(0, 1).narrow(0, 0, lengths[i]);
        return pages.reshape({lengths[i], heads, -1}).transpose(0, 1);
    };
    for (size_t i = 0; i < query_ends.size(); ++i) {
        const int64_t begin = i == 0 ? 0 : query_ends[i - 1];
        if (query_ends[i] == begin) continue;
        const auto q = query.slice(0, begin, query_ends[i]).transpose(0, 1);
        const auto k = rows(key, static_cast<int64_t>(i)), v = rows(value, static_cast<int64_t>(i));
        const auto batch = [](const Tensor& t) { return t.unsqueeze(0).to(at::kFloat); };
        const Attention attention{batch(q), batch(k), batch(v), {}, mask_of(o.mode, mask, q.size(1), k.size(1), o.before, o.after), {}, o.scale, true};
        out.slice(0, begin, query_ends[i]).copy_(std::get<0>(attention.forward()).squeeze(0).transpose(0, 1));
    }
}

Tensor rotated(const Tensor& x, int64_t mode) {
    if (mode == 0) {
        const auto halves = x.chunk(2, -1);
        return at::cat({-halves[1], halves[0]}, -1);
    }
    if (mode != 1) unsimulated(("rotary position embedding's mode " + std::to_string(mode)).c_str());
    const auto pairs = x.unflatten(-1, {-1, 2});
    return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

std::pair<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& gamma, double epsilon) {
    std::vector<int64_t> dims(gamma.dim());
    for (int64_t i = 0; i < gamma.dim(); ++i) dims[i] = x.dim() - gamma.dim() + i;
    const auto wide = x.to(at::kFloat);
    const auto rstd = at::rsqrt(wide.square().mean(dims, /*keepdim=*/true) + epsilon);
    return {wide * rstd * gamma, rstd};
}

void rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& rstd, const Tensor& gamma, const Out& dx, const Out& dgamma) {
    std::vector<int64_t> dims(gamma.dim());
    for (int64_t i = 0; i < gamma.dim(); ++i) dims[i] = x.dim() - gamma.dim() + i;
    const auto normal = x.to(at::kFloat) * rstd, g = grad.to(at::kFloat) * gamma;
    dx = (g - normal * (g * normal).mean(dims, /*keepdim=*/true)) * rstd;
    dgamma = (grad * normal).sum_to_size(gamma.sizes());
}

}  // namespace

OP(aclnnFlashAttentionScore,
   (Float query, Float key, Float value, Tensor pse, Tensor drop, Tensor, Tensor mask, Ints, double scale, double keep_prob, int64_t before,
    int64_t after, int64_t heads, Text layout, int64_t precision, int64_t mode, Out max, Out sum, Out, Out out),
   flash_forward(query, key, value, pse, drop, mask, {}, {}, {scale, keep_prob, before, after, heads, layout, precision, mode}, max, sum, out))
OP(aclnnFlashAttentionScoreGrad,
   (Float query, Float key, Float value, Float grad, Tensor pse, Tensor drop, Tensor, Tensor mask, Tensor, Tensor, Tensor, Tensor, Ints,
    double scale, double keep_prob, int64_t before, int64_t after, int64_t heads, Text layout, int64_t precision, int64_t mode, Out dq, Out dk,
    Out dv, Out dpse),
   flash_backward(query, key, value, grad, pse, drop, mask, {}, {}, {scale, keep_prob, before, after, heads, layout, precision, mode}, dq, dk, dv,
                  dpse))
OP(aclnnFlashAttentionVarLenScore,
   (Float query, Float key, Float value, Tensor pse, Tensor drop, Tensor, Tensor mask, Ints, Ints query_ends, Ints key_ends, double scale,
    double keep_prob, int64_t before, int64_t after, int64_t heads, Text layout, int64_t precision, int64_t mode, Out max, Out sum, Out, Out out),
   flash_forward(query, key, value, pse, drop, mask, query_ends, key_ends, {scale, keep_prob, before, after, heads, layout, precision, mode}, max,
                 sum, out))
OP(aclnnFlashAttentionUnpaddingScoreGrad,
   (Float query, Float key, Float value, Float grad, Tensor pse, Tensor drop, Tensor, Tensor mask, Tensor, Tensor, Tensor, Tensor, Ints,
    Ints query_ends, Ints key_ends, double scale, double keep_prob, int64_t before, int64_t after, int64_t heads, Text layout, int64_t precision,
    int64_t mode, Out dq, Out dk, Out dv, Out dpse),
   flash_backward(query, key, value, grad, pse, drop, mask, query_ends, key_ends,
                  {scale, keep_prob, before, after, heads, layout, precision, mode}, dq, dk, dv, dpse))

// It has no float32 on the hardware.
OP(aclnnFusedInferAttentionScoreV3,
   (Half query, Tensors key, Tensors value, Tensor pse, Tensor mask, Ints query_ends, Ints lengths, Tensor dequant1, Tensor quant1, Tensor dequant2,
    Tensor quant2, Tensor offset2, Tensor antiquant, Tensor antiquant_offset, Tensor blocks, Tensor query_padding, Tensor padding,
    Tensor key_antiquant, Tensor key_offset, Tensor value_antiquant, Tensor value_offset, Tensor key_prefix, Tensor value_prefix, Ints prefix,
    Tensor query_rope, Tensor key_rope, Tensor rope_antiquant, int64_t heads, double scale, int64_t before, int64_t after, Text layout,
    int64_t key_heads, int64_t mode, int64_t precision, int64_t, int64_t, bool wants_sums, int64_t, int64_t, Out out, Out), {
    for (const auto& extra : {pse, dequant1, quant1, dequant2, quant2, offset2, antiquant, antiquant_offset, query_padding, padding, key_antiquant,
                              key_offset, value_antiquant, value_offset, key_prefix, value_prefix, query_rope, key_rope, rope_antiquant})
        if (extra.defined()) unsimulated("aclnnFusedInferAttentionScore with quantization, padding, shared prefixes, a bias or rotation");
    if (!prefix.empty() || wants_sums || key.size() != 1) unsimulated("aclnnFusedInferAttentionScore with sums or several caches");
    infer(query, key.at(0), value.at(0), mask, query_ends, lengths, blocks, key_heads == 0 ? heads : key_heads,
          {scale, 1.0, before, after, heads, layout, precision, mode}, out);
})

OP(aclnnRmsNorm, (Float x, Float gamma, double epsilon, Out y, Out rstd), std::tie(y, rstd) = rms_norm(x, gamma, epsilon))
OP(aclnnRmsNormGrad, (Float grad, Float x, Tensor rstd, Float gamma, Out dx, Out dgamma), rms_norm_backward(grad, x, rstd, gamma, dx, dgamma))
OP(aclnnAddRmsNorm, (Float a, Float b, Float gamma, double epsilon, Out y, Out rstd, Out sum), {
    sum = a + b;
    std::tie(y, rstd) = rms_norm(sum, gamma, epsilon);
})

OP(aclnnAddRmsNormBias, (Float a, Float b, Float gamma, Tensor bias, double epsilon, Out y, Out rstd, Out sum), {
    sum = a + b;
    auto [normal, scale] = rms_norm(sum, gamma, epsilon);
    y = bias.defined() ? normal + bias : normal;
    rstd = scale;
})

OP(aclnnRotaryPositionEmbedding, (Float x, Float cos, Float sin, int64_t mode, Out out), out = x * cos + rotated(x, mode) * sin)
OP(aclnnRotaryPositionEmbeddingGrad, (Float grad, Float cos, Float sin, Tensor x, int64_t mode, Out dx, Out dcos, Out dsin), {
    dx = grad * cos - rotated(grad * sin, mode);  // a rotation's transpose is its negative
    if (x.defined()) dcos = (grad * x).sum_to_size(cos.sizes()), dsin = (grad * rotated(x, mode)).sum_to_size(sin.sizes());
})

OP(aclnnSwiGlu, (Float self, int64_t dim, Out out), {
    const auto halves = self.chunk(2, dim);
    out = at::silu(halves[0]) * halves[1];
})
OP(aclnnSwiGluGrad, (Float grad, Float self, int64_t dim, Out out), {
    const auto halves = self.chunk(2, dim);
    out = at::cat({at::silu_backward(grad * halves[1], halves[0]), grad * at::silu(halves[0])}, dim);
})
OP(aclnnGeGluV3, (Float self, int64_t dim, int64_t tanh, bool activate_left, Out out, Out activated), {
    const auto halves = self.chunk(2, dim);
    activated = at::gelu(halves[activate_left ? 0 : 1], tanh != 0 ? "tanh" : "none");
    out = halves[activate_left ? 1 : 0] * activated;
})
OP(aclnnGeGluV3Backward, (Float grad, Float self, Float activated, int64_t dim, int64_t tanh, bool activate_left, Out out), {
    const auto halves = self.chunk(2, dim);
    const auto of_gate = at::gelu_backward(grad * halves[activate_left ? 1 : 0], halves[activate_left ? 0 : 1], tanh != 0 ? "tanh" : "none");
    out = activate_left ? at::cat({of_gate, grad * activated}, dim) : at::cat({grad * activated, of_gate}, dim);
})
