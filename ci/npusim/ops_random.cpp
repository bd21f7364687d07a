// Random numbers. torch_npu gives each operator its generator's seed and offset, from which alone the numbers follow.
#include "opapi.h"

#include <ATen/CPUGeneratorImpl.h>

using namespace npusim;

namespace {

at::Generator generator(int64_t seed, int64_t offset) {
    const auto mixed = static_cast<uint64_t>(seed) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(offset);
    return at::detail::createCPUGenerator(mixed);
}

Tensor like(const Tensor& out) { return at::empty(out.sizes(), out.options()); }

/// A bit for each element, eight to a byte, the lowest first: 1 keeps the element.
void keep_mask(double drop, int64_t seed, int64_t offset, const Out& mask) {
    const auto bits = at::empty({mask.numel(), 8}, at::kByte).bernoulli_(1 - drop, generator(seed, offset));
    mask = bits.bitwise_left_shift(at::arange(8, at::kByte)).sum(1).view_as(mask);
}

Tensor leaky(const Tensor& self, Out noise, const Scalar& lower, const Scalar& upper, bool training, int64_t seed, int64_t offset) {
    return at::rrelu_with_noise(self, noise, lower, upper, training, generator(seed, offset));
}

}  // namespace

Tensor npusim::unpack_bits(const Tensor& bits, int64_t first, at::IntArrayRef shape) {
    const auto bytes = bits.flatten().view(at::kByte).unsqueeze(1);
    const auto each = bytes.bitwise_right_shift(at::arange(8, at::kByte)).bitwise_and(1).flatten();
    return each.narrow(0, first, c10::multiply_integers(shape)).view(shape);
}

OP(aclnnInplaceUniform, (Out self, double from, double to, int64_t seed, int64_t offset),
   self = like(self).uniform_(from, to, generator(seed, offset)))
OP(aclnnInplaceNormal, (Out self, float mean, float std, int64_t seed, int64_t offset), self = like(self).normal_(mean, std, generator(seed, offset)))
OP(aclnnNormalFloatFloat, (float mean, float std, int64_t seed, int64_t offset, Out out), out = like(out).normal_(mean, std, generator(seed, offset)))
OP(aclnnNormalFloatTensor, (float mean, Tensor std, int64_t seed, int64_t offset, Out out),
   out = mean + std * like(out).normal_(0, 1, generator(seed, offset)))
OP(aclnnNormalTensorFloat, (Tensor mean, float std, int64_t seed, int64_t offset, Out out),
   out = mean + std * like(out).normal_(0, 1, generator(seed, offset)))
OP(aclnnNormalTensorTensor, (Tensor mean, Tensor std, int64_t seed, int64_t offset, Out out),
   out = mean + std * like(out).normal_(0, 1, generator(seed, offset)))
OP(aclnnInplaceRandom, (Out self, int64_t from, int64_t to, int64_t seed, int64_t offset),
   self = like(self).random_(from, to, generator(seed, offset)))
OP(aclnnInplaceBernoulli, (Out self, Scalar p, int64_t seed, int64_t offset),
   self = like(self).bernoulli_(p.toDouble(), generator(seed, offset)))
OP(aclnnInplaceBernoulliTensor, (Out self, Tensor p, int64_t seed, int64_t offset), self = like(self).bernoulli_(p, generator(seed, offset)))
OP(aclnnSimThreadExponential, (Out self, int64_t, double lambda, int64_t seed, int64_t offset),
   self = like(self).exponential_(lambda, generator(seed, offset)))
OP(aclnnRandperm, (int64_t n, int64_t seed, int64_t offset, Out out), out = at::randperm(n, generator(seed, offset), at::kLong))
OP(aclnnMultinomial, (Tensor self, int64_t samples, bool replacement, int64_t seed, int64_t offset, Out out),
   out = at::multinomial(self, samples, replacement, generator(seed, offset)))
OP(aclnnRReluWithNoise, (Tensor self, Out noise, Scalar lower, Scalar upper, bool training, int64_t seed, int64_t offset, Out out),
   out = leaky(self, noise, lower, upper, training, seed, offset))
OP(aclnnInplaceRReluWithNoise, (Out self, Out noise, Scalar lower, Scalar upper, bool training, int64_t seed, int64_t offset),
   self = leaky(self, noise, lower, upper, training, seed, offset))
OP(aclnnDropoutGenMask, (Ints, double drop, int64_t seed, int64_t offset, Out mask), keep_mask(drop, seed, offset, mask))
OP(aclnnDropoutGenMaskV2, (Ints, double drop, int64_t seed, int64_t offset, DType, Out mask), keep_mask(drop, seed, offset, mask))
OP(aclnnDropoutDoMask, (Tensor self, Tensor mask, double drop, Out out), out = self * unpack_bits(mask, 0, self.sizes()) / (1 - drop))
