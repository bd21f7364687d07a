// Operators on lists of tensors, and the optimizers' own.
#include "opapi.h"

using namespace npusim;

namespace {

Tensors each(const Tensors& list, const std::function<Tensor(const Tensor&)>& function) {
    Tensors results;
    for (const auto& tensor : list) results.push_back(function(tensor));
    return results;
}

/// `second` is tensors or scalars, one for each of `list`.
template <class List>
Tensors each(const Tensors& list, const List& second, const std::function<Tensor(const Tensor&, const typename List::value_type&)>& function) {
    TORCH_CHECK(list.size() == second.size(), "lists of ", list.size(), " and ", second.size());
    Tensors results;
    for (size_t i = 0; i < list.size(); ++i) results.push_back(function(list[i], second[i]));
    return results;
}

template <class Values>
Tensors addc(const Tensors& self, const Tensors& a, const Tensors& b, const Values& value, Tensor (*function)(const Tensor&, const Tensor&, const Tensor&, const Scalar&)) {
    Tensors results;
    for (size_t i = 0; i < self.size(); ++i) {
        if constexpr (std::is_same_v<Values, Scalar>) results.push_back(function(self[i], a[i], b[i], value));
        else if constexpr (std::is_same_v<Values, Tensor>) results.push_back(function(self[i], a[i], b[i], value.item()));
        else results.push_back(function(self[i], a[i], b[i], value[i]));
    }
    return results;
}

Tensor round_off(const Tensor& x, int64_t mode) {
    switch (mode) {
        case 1: return at::round(x);
        case 2: return at::floor(x);
        case 3: return at::ceil(x);
        case 5: return at::trunc(x);
        case 7: return at::frac(x);
    }
    unsimulated(("aclnnForeachRoundOffNumber's mode " + std::to_string(mode)).c_str());
}

}  // namespace

#define FOREACH_UNARY(NAME, FUNCTION) OP(aclnnForeach##NAME, (Tensors self, Outs out), out = each(self, [](auto& x) { return FUNCTION(x); }))
FOREACH_UNARY(Abs, at::abs)
FOREACH_UNARY(Acos, at::acos)
FOREACH_UNARY(Asin, at::asin)
FOREACH_UNARY(Atan, at::atan)
FOREACH_UNARY(Copy, )
FOREACH_UNARY(Cos, at::cos)
FOREACH_UNARY(Cosh, at::cosh)
FOREACH_UNARY(Erf, at::erf)
FOREACH_UNARY(Erfc, at::erfc)
FOREACH_UNARY(Exp, at::exp)
FOREACH_UNARY(Expm1, at::expm1)
FOREACH_UNARY(Log, at::log)
FOREACH_UNARY(Log10, at::log10)
FOREACH_UNARY(Log1p, at::log1p)
FOREACH_UNARY(Log2, at::log2)
FOREACH_UNARY(Neg, at::neg)
FOREACH_UNARY(Reciprocal, at::reciprocal)
FOREACH_UNARY(Sigmoid, at::sigmoid)
FOREACH_UNARY(Sign, at::sign)
FOREACH_UNARY(Sin, at::sin)
FOREACH_UNARY(Sinh, at::sinh)
FOREACH_UNARY(Sqrt, at::sqrt)
FOREACH_UNARY(Tan, at::tan)
FOREACH_UNARY(Tanh, at::tanh)

// With another list, with one scalar (in a tensor of the device, or in V2 a scalar), and with a list of scalars.
#define FOREACH_BINARY(NAME, FUNCTION)                                                                                                   \
    OP(aclnnForeach##NAME##List, (Tensors self, Tensors other, Outs out),                                                              \
       out = each(self, other, [](auto& x, auto& y) { return FUNCTION(x, y); }))                                                       \
    FOREACH_SCALAR(NAME, FUNCTION)
#define FOREACH_SCALAR(NAME, FUNCTION)                                                                                                   \
    OP(aclnnForeach##NAME##Scalar, (Tensors self, Tensor value, Outs out),                                                             \
       out = each(self, [&](auto& x) { return FUNCTION(x, value.item()); }))                                                           \
    OP(aclnnForeach##NAME##ScalarV2, (Tensors self, Scalar value, Outs out),                                                           \
       out = each(self, [&](auto& x) { return FUNCTION(x, value); }))                                                                  \
    OP(aclnnForeach##NAME##ScalarList, (Tensors self, Scalars values, Outs out),                                                       \
       out = each(self, values, [](auto& x, auto& y) { return FUNCTION(x, y); }))
FOREACH_BINARY(Mul, at::mul)
FOREACH_BINARY(Div, at::div)
FOREACH_BINARY(Pow, at::pow)
FOREACH_SCALAR(Add, at::add)
FOREACH_SCALAR(Sub, at::sub)
OP(aclnnForeachAddList, (Tensors self, Tensors other, Tensor alpha, Outs out),
   out = each(self, other, [&](auto& x, auto& y) { return at::add(x, y, alpha.item()); }))
OP(aclnnForeachAddListV2, (Tensors self, Tensors other, Scalar alpha, Outs out),
   out = each(self, other, [&](auto& x, auto& y) { return at::add(x, y, alpha); }))
OP(aclnnForeachSubList, (Tensors self, Tensors other, Tensor alpha, Outs out),
   out = each(self, other, [&](auto& x, auto& y) { return at::sub(x, y, alpha.item()); }))
OP(aclnnForeachSubListV2, (Tensors self, Tensors other, Scalar alpha, Outs out),
   out = each(self, other, [&](auto& x, auto& y) { return at::sub(x, y, alpha); }))
OP(aclnnForeachMaximumList, (Tensors self, Tensors other, Outs out), out = each(self, other, [](auto& x, auto& y) { return at::maximum(x, y); }))
OP(aclnnForeachMaximumScalar, (Tensors self, Tensor min, Outs out), out = each(self, [&](auto& x) { return at::clamp_min(x, min.item()); }))
OP(aclnnForeachMaximumScalarV2, (Tensors self, Scalar min, Outs out), out = each(self, [&](auto& x) { return at::clamp_min(x, min); }))
OP(aclnnForeachMaximumScalarList, (Tensors self, Scalars min, Outs out), out = each(self, min, [](auto& x, auto& y) { return at::clamp_min(x, y); }))
OP(aclnnForeachMinimumList, (Tensors self, Tensors other, Outs out), out = each(self, other, [](auto& x, auto& y) { return at::minimum(x, y); }))
OP(aclnnForeachMinimumScalar, (Tensors self, Tensor max, Outs out), out = each(self, [&](auto& x) { return at::clamp_max(x, max.item()); }))
OP(aclnnForeachMinimumScalarV2, (Tensors self, Scalar max, Outs out), out = each(self, [&](auto& x) { return at::clamp_max(x, max); }))
OP(aclnnForeachMinimumScalarList, (Tensors self, Scalars max, Outs out), out = each(self, max, [](auto& x, auto& y) { return at::clamp_max(x, y); }))
OP(aclnnForeachPowScalarAndTensor, (Scalar base, Tensors exponent, Outs out), out = each(exponent, [&](auto& x) { return at::pow(base, x); }))
OP(aclnnForeachLerpList, (Tensors self, Tensors end, Tensors weight, Outs out), {
    for (size_t i = 0; i < self.size(); ++i) out[i] = at::lerp(self[i], end[i], weight[i]);
})
OP(aclnnForeachLerpScalar, (Tensors self, Tensors end, Scalar weight, Outs out),
   out = each(self, end, [&](auto& x, auto& y) { return at::lerp(x, y, weight); }))
OP(aclnnForeachAddcmulScalar, (Tensors self, Tensors a, Tensors b, Tensor value, Outs out), out = addc(self, a, b, value, at::addcmul))
OP(aclnnForeachAddcmulScalarV2, (Tensors self, Tensors a, Tensors b, Scalar value, Outs out), out = addc(self, a, b, value, at::addcmul))
OP(aclnnForeachAddcmulScalarList, (Tensors self, Tensors a, Tensors b, Scalars value, Outs out), out = addc(self, a, b, value, at::addcmul))
OP(aclnnForeachAddcdivScalar, (Tensors self, Tensors a, Tensors b, Tensor value, Outs out), out = addc(self, a, b, value, at::addcdiv))
OP(aclnnForeachAddcdivScalarV2, (Tensors self, Tensors a, Tensors b, Scalar value, Outs out), out = addc(self, a, b, value, at::addcdiv))
OP(aclnnForeachAddcdivScalarList, (Tensors self, Tensors a, Tensors b, Scalars value, Outs out), out = addc(self, a, b, value, at::addcdiv))
OP(aclnnForeachRoundOffNumber, (Tensors self, Tensor mode, Outs out),
   out = each(self, [&](auto& x) { return round_off(x, mode.item().toLong()); }))
OP(aclnnForeachRoundOffNumberV2, (Tensors self, Scalar mode, Outs out), out = each(self, [&](auto& x) { return round_off(x, mode.toLong()); }))
OP(aclnnForeachNorm, (Tensors self, Scalar p, Outs out), out = each(self, [&](auto& x) { return at::linalg_vector_norm(x, p); }))
OP(aclnnForeachZeroInplace, (Outs self), { for (auto& x : self) x.zero_(); })
OP(aclnnForeachNonFiniteCheckAndUnscale, (Outs grads, Out found, Tensor inverse_scale), {
    at::_amp_foreach_non_finite_check_and_unscale_(Tensors(grads.begin(), grads.end()), found, inverse_scale);
})
OP(aclnnAmpUpdateScale, (Out scale, Out growth, Tensor found, double up, double down, int64_t interval, Out, Out),
   at::_amp_update_scale_(scale, growth, found, up, down, interval))

OP(aclnnApplyAdamWV2, (Out param, Out exp_avg, Out exp_avg_sq, Out max_exp_avg_sq, Tensor grad, Tensor step, float lr, float beta1, float beta2,
                       float weight_decay, float eps, bool amsgrad, bool maximize), {
    const double t = step.item().toDouble() + 1;
    const auto g = maximize ? -grad : grad;
    exp_avg = at::lerp(exp_avg, g, 1 - beta1);
    exp_avg_sq = exp_avg_sq * beta2 + (1 - beta2) * g * g;
    if (amsgrad) max_exp_avg_sq = at::maximum(max_exp_avg_sq, exp_avg_sq);
    const auto denominator = (amsgrad ? max_exp_avg_sq : exp_avg_sq).sqrt() / std::sqrt(1 - std::pow(beta2, t)) + eps;
    param = param * (1 - lr * weight_decay) - (lr / (1 - std::pow(beta1, t))) * exp_avg / denominator;
})
