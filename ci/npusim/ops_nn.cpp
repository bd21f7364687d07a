// Neural networks: products of matrices, convolution, normalization, embedding, losses, decompositions.
#include "opapi.h"

#include <algorithm>

using namespace npusim;

namespace {

std::array<bool, 3> three(const Bools& mask) { return {mask[0], mask[1], mask[2]}; }

/// Norms are computed in float32, whatever the inputs are.
Tensor wide(const Tensor& t) { return t.defined() ? t.to(at::kFloat) : t; }

/// One weight for each channel, shaped for the input.
Tensor by_channel(const Tensor& weight, int64_t dims) {
    std::vector<int64_t> shape(std::max<int64_t>(dims - 1, 1), 1);
    shape[0] = -1;
    return weight.numel() == 1 ? weight : weight.view(shape);
}

/// The gradient of a loss in which each element has this one.
Tensor reduced(const Tensor& grad, const Tensor& each, int64_t reduction) {
    return reduction == at::Reduction::Mean ? grad * each / each.numel() : grad * each;
}

/// A result that the caller may not want: it then passes an empty output.
void assign_wanted(const Out& out, const Tensor& value) {
    if (out.defined() && out.numel() > 0) out = value;
}

}  // namespace

OP(aclnnMm, (Float a, Float b, Out out, int8_t), out = at::mm(a, b))
OP(aclnnMatmul, (Float a, Float b, Out out, int8_t), out = at::matmul(a, b))
OP(aclnnBatchMatMul, (Float a, Float b, Out out, int8_t), out = at::bmm(a, b))
OP(aclnnMv, (Float a, Float b, Out out, int8_t), out = at::mv(a, b))
OP(aclnnDot, (Float a, Float b, Out out), out = at::dot(a, b))
OP(aclnnAddmm, (Float self, Float a, Float b, Scalar beta, Scalar alpha, Out out, int8_t), out = at::addmm(self, a, b, beta, alpha))
OP(aclnnInplaceAddmm, (Out self, Float a, Float b, Scalar beta, Scalar alpha, int8_t), self = at::addmm(self, a, b, beta, alpha))
OP(aclnnAddmv, (Float self, Float a, Float b, Scalar alpha, Scalar beta, Out out, int8_t), out = at::addmv(self, a, b, beta, alpha))
OP(aclnnAddbmm, (Float self, Float a, Float b, Scalar beta, Scalar alpha, Out out, int8_t), out = at::addbmm(self, a, b, beta, alpha))
OP(aclnnBaddbmm, (Float self, Float a, Float b, Scalar beta, Scalar alpha, Out out, int8_t), out = at::baddbmm(self, a, b, beta, alpha))
OP(aclnnAddr, (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Out out), out = at::addr(self, a, b, beta, alpha))
OP(aclnnInplaceAddr, (Out self, Tensor a, Tensor b, Scalar beta, Scalar alpha), self = at::addr(self, a, b, beta, alpha))

OP(aclnnConvolution, (Float input, Float weight, Float bias, Ints stride, Ints padding, Ints dilation, bool transposed, Ints output_padding,
                      int64_t groups, Out out, int8_t),
   out = at::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups))
OP(aclnnConvolutionBackward, (Float grad, Float input, Float weight, Ints bias, Ints stride, Ints padding, Ints dilation, bool transposed,
                              Ints output_padding, int64_t groups, Bools mask, int8_t, Out dinput, Out dweight, Out dbias),
   std::tie(dinput, dweight, dbias) =
       at::convolution_backward(grad, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, three(mask)))
OP(aclnnConvDepthwise2d, (Float input, Float weight, Ints, Float bias, Ints stride, Ints padding, Ints dilation, Out out, int8_t),
   out = at::conv2d(input, weight, bias, stride, padding, dilation, input.size(1)))
OP(aclnnConvTbc, (Float self, Float weight, Float bias, int64_t pad, Out out, int8_t), out = at::conv_tbc(self, weight, bias, pad))

OP(aclnnLayerNorm, (Float input, Ints shape, Float weight, Float bias, double eps, Out out, Out mean, Out rstd),
   std::tie(out, mean, rstd) = at::native_layer_norm(wide(input), shape, wide(weight), wide(bias), eps))
OP(aclnnFastLayerNorm, (Float input, Ints shape, Float weight, Float bias, double eps, Out out, Out mean, Out rstd),
   std::tie(out, mean, rstd) = at::native_layer_norm(wide(input), shape, wide(weight), wide(bias), eps))
OP(aclnnLayerNormBackward, (Float grad, Float input, Ints shape, Tensor mean, Tensor rstd, Float weight, Float bias, Bools mask, Out dinput,
                            Out dweight, Out dbias),
   std::tie(dinput, dweight, dbias) = at::native_layer_norm_backward(wide(grad), wide(input), shape, wide(mean), wide(rstd), wide(weight), wide(bias), three(mask)))
OP(aclnnGroupNorm, (Float input, Float weight, Float bias, int64_t n, int64_t c, int64_t hw, int64_t groups, double eps, Out out, Out mean, Out rstd),
   std::tie(out, mean, rstd) = at::native_group_norm(wide(input), wide(weight), wide(bias), n, c, hw, groups, eps))
OP(aclnnGroupNormBackward, (Float grad, Float input, Tensor mean, Tensor rstd, Float weight, int64_t n, int64_t c, int64_t hw, int64_t groups,
                            Bools mask, Out dinput, Out dweight, Out dbias),
   std::tie(dinput, dweight, dbias) = at::native_group_norm_backward(wide(grad), wide(input), wide(mean), wide(rstd), wide(weight), n, c, hw, groups, three(mask)))
OP(aclnnBatchNorm, (Float input, Float weight, Float bias, Out running_mean, Out running_var, bool training, double momentum, double eps, Out out,
                    Out mean, Out rstd), {
    const auto mean_so_far = wide(running_mean), var_so_far = wide(running_var);
    const auto result = at::native_batch_norm(wide(input), wide(weight), wide(bias), mean_so_far, var_so_far, training, momentum, eps);
    out = std::get<0>(result);
    running_mean = mean_so_far, running_var = var_so_far;
    if (training) mean = std::get<1>(result), rstd = std::get<2>(result);
})
OP(aclnnBatchNormBackward, (Float grad, Float input, Float weight, Tensor running_mean, Tensor running_var, Tensor mean, Tensor rstd, bool training,
                            double eps, Bools mask, Out dinput, Out dweight, Out dbias),
   std::tie(dinput, dweight, dbias) =
       at::native_batch_norm_backward(wide(grad), wide(input), wide(weight), wide(running_mean), wide(running_var), wide(mean), wide(rstd), training,
                                      eps, three(mask)))

OP(aclnnEmbedding, (Tensor weight, Tensor indices, Out out), out = at::embedding(weight, indices))
OP(aclnnEmbeddingDenseBackward, (Tensor grad, Tensor indices, int64_t rows, int64_t padding, bool scale, Out out),
   out = at::embedding_dense_backward(grad, indices, rows, padding, scale))
OP(aclnnEmbeddingBag, (Tensor weight, Tensor indices, Tensor offsets, bool scale, int64_t mode, bool sparse, Tensor sample_weights, bool include_last,
                       int64_t padding, Out out, Out offset2bag, Out bag_size, Out max_indices), {
    auto result = at::_embedding_bag(weight, indices, offsets, scale, mode, sparse, sample_weights, include_last, padding);
    out = std::get<0>(result);
    assign_wanted(offset2bag, std::get<1>(result));
    assign_wanted(bag_size, std::get<2>(result));
    assign_wanted(max_indices, std::get<3>(result));
})
OP(aclnnEmbeddingRenorm, (Out self, Tensor indices, double max, double p), at::embedding_renorm_(self, indices, max, p))

OP(aclnnSoftmax, (Tensor self, int64_t dim, Out out), out = at::softmax(self, dim, out.scalar_type()))
OP(aclnnSoftmaxBackward, (Tensor grad, Tensor output, int64_t dim, Out out),
   out = at::_softmax_backward_data(grad, output, dim, output.scalar_type()))
OP(aclnnLogSoftmax, (Tensor self, int64_t dim, Out out), out = at::log_softmax(self, dim, out.scalar_type()))
OP(aclnnLogSoftmaxBackward, (Tensor grad, Tensor output, int64_t dim, Out out),
   out = at::_log_softmax_backward_data(grad, output, dim, output.scalar_type()))

OP(aclnnNLLLoss, (Float self, Tensor target, Float weight, int64_t reduction, int64_t ignore, Out out, Out total),
   std::tie(out, total) = at::nll_loss_forward(self, target.to(at::kLong), weight, reduction, ignore))
OP(aclnnNLLLossBackward,
   (Float grad, Float self, Tensor target, Float weight, int64_t reduction, int64_t ignore, Tensor total, Out out),
   out = at::nll_loss_backward(grad, self, target.to(at::kLong), weight, reduction, ignore, total))
OP(aclnnNLLLoss2d, (Float self, Tensor target, Float weight, int64_t reduction, int64_t ignore, Out out, Out total),
   std::tie(out, total) = at::nll_loss2d_forward(self, target.to(at::kLong), weight, reduction, ignore))
OP(aclnnNLLLoss2dBackward,
   (Float grad, Float self, Tensor target, Float weight, int64_t reduction, int64_t ignore, Tensor total, Out out),
   out = at::nll_loss2d_backward(grad, self, target.to(at::kLong), weight, reduction, ignore, total))
OP(aclnnMseLoss, (Tensor self, Tensor target, int64_t reduction, Out out), out = at::mse_loss(self, target, reduction))
OP(aclnnMseLossBackward, (Tensor grad, Tensor self, Tensor target, int64_t reduction, Out out),
   out = at::mse_loss_backward(grad, self, target, reduction))
OP(aclnnL1Loss, (Tensor self, Tensor target, int64_t reduction, Out out), out = at::l1_loss(self, target, reduction))
OP(aclnnSmoothL1Loss, (Tensor self, Tensor target, int64_t reduction, float beta, Out out), out = at::smooth_l1_loss(self, target, reduction, beta))
OP(aclnnSmoothL1LossBackward, (Tensor grad, Tensor self, Tensor target, int64_t reduction, float beta, Out out),
   out = at::smooth_l1_loss_backward(grad, self, target, reduction, beta))
OP(aclnnSoftMarginLoss, (Tensor self, Tensor target, int64_t reduction, Out out), out = at::soft_margin_loss(self, target, reduction))
OP(aclnnSoftMarginLossBackward, (Tensor grad, Tensor self, Tensor target, int64_t reduction, Out out),
   out = at::soft_margin_loss_backward(grad, self, target, reduction))
OP(aclnnMultilabelMarginLoss, (Tensor self, Tensor target, int64_t reduction, Out out, Out is_target),
   std::tie(out, is_target) = at::multilabel_margin_loss_forward(self, target, reduction))
OP(aclnnBinaryCrossEntropy, (Tensor self, Tensor target, Tensor weight, int64_t reduction, Out out),
   out = at::binary_cross_entropy(self, target, weight, reduction))
OP(aclnnBinaryCrossEntropyBackward, (Tensor grad, Tensor self, Tensor target, Tensor weight, int64_t reduction, Out out),
   out = at::binary_cross_entropy_backward(grad, self, target, weight, reduction))
OP(aclnnBinaryCrossEntropyWithLogits, (Tensor self, Tensor target, Tensor weight, Tensor positive, int64_t reduction, Out out),
   out = at::binary_cross_entropy_with_logits(self, target, weight, positive, reduction))
OP(aclnnBinaryCrossEntropyWithLogitsBackward, (Tensor grad, Tensor self, Tensor target, Tensor weight, Tensor positive, int64_t reduction, Out out), {
    const auto wanted = positive.defined() ? positive * target : target;
    auto each = (wanted + 1 - target) * at::sigmoid(self) - wanted;
    if (weight.defined()) each = each * weight;
    out = reduced(grad, each, reduction);
})
OP(aclnnL1LossBackward, (Tensor grad, Tensor self, Tensor target, int64_t reduction, Out out),
   out = reduced(grad, at::sign(self - target), reduction))
OP(aclnnKlDivBackward, (Tensor grad, Tensor, Tensor target, int64_t reduction, bool log_target, Out out),
   out = reduced(grad, log_target ? -at::exp(target) : -target, reduction).expand_as(out))
OP(aclnnKlDivTargetBackward, (Tensor grad, Tensor self, Tensor target, int64_t reduction, bool log_target, Out out), {
    const auto each = log_target ? at::exp(target) * (target - self + 1) : at::where(target > 0, at::log(target) + 1 - self, 0);
    out = reduced(grad, each, reduction);
})
OP(aclnnPreluBackward, (Tensor grad, Tensor self, Tensor weight, Out dself, Out dweight), {
    const auto shaped = by_channel(weight, self.dim());
    const auto grads = at::_prelu_kernel_backward(grad, self, shaped);
    dself = std::get<0>(grads);
    dweight = std::get<1>(grads).sum_to_size(shaped.sizes()).view_as(dweight);
})
OP(aclnnKlDiv, (Tensor self, Tensor target, int64_t reduction, bool log_target, Out out), out = at::kl_div(self, target, reduction, log_target))
// The hardware's alpha has a padded last dimension.
OP(aclnnCtcLoss, (Tensor log_probs, Tensor targets, Ints inputs, Ints lengths, int64_t blank, bool zero_infinity, Out loss, Out alpha), {
    const auto result = at::_ctc_loss(log_probs, targets, inputs, lengths, blank, zero_infinity);
    loss = std::get<0>(result);
    alpha.narrow(2, 0, std::get<1>(result).size(2)).copy_(std::get<1>(result));
})
OP(aclnnCtcLossBackward, (Tensor grad, Tensor log_probs, Tensor targets, Ints inputs, Ints lengths, Tensor loss, Tensor alpha, int64_t blank,
                          bool zero_infinity, Out out), {
    const auto used = 2 * *std::max_element(lengths.begin(), lengths.end()) + 1;
    out = at::_ctc_loss_backward(grad, log_probs, targets, inputs, lengths, loss, alpha.narrow(2, 0, used), blank, zero_infinity);
})

OP(aclnnLinalgCross, (Tensor self, Tensor other, int64_t dim, Out out), out = at::linalg_cross(self, other, dim))
OP(aclnnLinalgCholesky, (Tensor self, bool upper, Out out), out = at::linalg_cholesky(self, upper))
OP(aclnnLinalgQr, (Tensor self, int64_t mode, Out q, Out r), {
    constexpr const char* kModes[] = {"reduced", "complete", "r"};
    const auto qr = at::linalg_qr(self, kModes[mode]);
    assign_wanted(q, std::get<0>(qr));
    r = std::get<1>(qr);
})
OP(aclnnSvd, (Tensor self, bool full, bool, Out s, Out u, Out v), {
    const auto usv = at::linalg_svd(self, full);
    s = std::get<1>(usv);
    assign_wanted(u, std::get<0>(usv));
    assign_wanted(v, std::get<2>(usv).mH());
})
OP(aclnnInverse, (Tensor self, Out out), out = at::inverse(self))
OP(aclnnSlogdet, (Tensor self, Out sign, Out log), std::tie(sign, log) = at::slogdet(self))
OP(aclnnTriangularSolve, (Tensor self, Tensor a, bool upper, bool transpose, bool unitriangular, Out x, Out m),
   std::tie(x, m) = at::triangular_solve(self, a, upper, transpose, unitriangular))
OP(aclnnCdist, (Tensor a, Tensor b, float p, int64_t mode, Out out), out = at::_cdist_forward(a, b, p, mode))
OP(aclnnPdist, (Tensor self, float p, Out out), out = at::_pdist_forward(self, p))
