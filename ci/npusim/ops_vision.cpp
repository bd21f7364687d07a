// Operators on images: pooling, interpolation, sampling on a grid.
#include "opapi.h"

using namespace npusim;

namespace {

/// A scale or divisor that was not given arrives as 0 or less.
template <class T>
std::optional<T> some(T value) { return value > 0 ? std::optional(value) : std::nullopt; }

}  // namespace

OP(aclnnAdaptiveAvgPool2d, (Tensor self, Ints size, Out out), out = at::_adaptive_avg_pool2d(self, size))
OP(aclnnAdaptiveAvgPool2dBackward, (Tensor grad, Tensor self, Out out), out = at::_adaptive_avg_pool2d_backward(grad, self))
OP(aclnnAdaptiveAvgPool3d, (Tensor self, Ints size, Out out), out = at::_adaptive_avg_pool3d(self, size))
OP(aclnnAdaptiveAvgPool3dBackward, (Tensor grad, Tensor self, Out out), out = at::_adaptive_avg_pool3d_backward(grad, self))
OP(aclnnAdaptiveMaxPool2d, (Tensor self, Ints size, Out out, Out indices), std::tie(out, indices) = at::adaptive_max_pool2d(self, size))
OP(aclnnAdaptiveMaxPool2dBackward, (Tensor grad, Tensor self, Tensor indices, Out out),
   out = at::adaptive_max_pool2d_backward(grad, self, indices.to(at::kLong)))
OP(aclnnAdaptiveMaxPool3d, (Tensor self, Ints size, Out out, Out indices), std::tie(out, indices) = at::adaptive_max_pool3d(self, size))
OP(aclnnAdaptiveMaxPool3dBackward, (Tensor grad, Tensor self, Tensor indices, Out out),
   out = at::adaptive_max_pool3d_backward(grad, self, indices.to(at::kLong)))
OP(aclnnAvgPool2d, (Tensor self, Ints kernel, Ints stride, Ints padding, bool ceil, bool count_pad, int64_t divisor, int8_t, Out out),
   out = at::avg_pool2d(self, kernel, stride, padding, ceil, count_pad, some(divisor)))
OP(aclnnAvgPool2dBackward,
   (Tensor grad, Tensor self, Ints kernel, Ints stride, Ints padding, bool ceil, bool count_pad, int64_t divisor, int8_t, Out out),
   out = at::avg_pool2d_backward(grad, self, kernel, stride, padding, ceil, count_pad, some(divisor)))
OP(aclnnAvgPool3d, (Tensor self, Ints kernel, Ints stride, Ints padding, bool ceil, bool count_pad, int64_t divisor, Out out),
   out = at::avg_pool3d(self, kernel, stride, padding, ceil, count_pad, some(divisor)))
OP(aclnnAvgPool3dBackward,
   (Tensor grad, Tensor self, Ints kernel, Ints stride, Ints padding, bool ceil, bool count_pad, int64_t divisor, Out out),
   out = at::avg_pool3d_backward(grad, self, kernel, stride, padding, ceil, count_pad, some(divisor)))
OP(aclnnMaxPool2dWithIndices, (Tensor self, Ints kernel, Ints stride, Ints padding, Ints dilation, bool ceil, Out out, Out indices),
   std::tie(out, indices) = at::max_pool2d_with_indices(self, kernel, stride, padding, dilation, ceil))
OP(aclnnMaxPool2dWithIndicesBackward,
   (Tensor grad, Tensor self, Tensor indices, Ints kernel, Ints stride, Ints padding, Ints dilation, bool ceil, Out out),
   out = at::max_pool2d_with_indices_backward(grad, self, kernel, stride, padding, dilation, ceil, indices.to(at::kLong)))
// The mask is the hardware's own note of the maxima; the gradient finds them again.
OP(aclnnMaxPool2dWithMask, (Tensor self, Ints kernel, Ints stride, Ints padding, Ints dilation, bool ceil, Out out, Out),
   out = at::max_pool2d(self, kernel, stride, padding, dilation, ceil))
OP(aclnnMaxPool2dWithMaskBackward,
   (Tensor grad, Tensor self, Tensor, Ints kernel, Ints stride, Ints padding, Ints dilation, bool ceil, Out out), {
    const auto indices = std::get<1>(at::max_pool2d_with_indices(self, kernel, stride, padding, dilation, ceil));
    out = at::max_pool2d_with_indices_backward(grad, self, kernel, stride, padding, dilation, ceil, indices);
})
OP(aclnnMaxPool3dWithArgmax, (Tensor self, Ints kernel, Ints stride, Ints padding, Ints dilation, bool ceil, Out out, Out indices),
   std::tie(out, indices) = at::max_pool3d_with_indices(self, kernel, stride, padding, dilation, ceil))
OP(aclnnMaxPool3dWithArgmaxBackward,
   (Tensor grad, Tensor self, Tensor indices, Ints kernel, Ints stride, Ints padding, Ints dilation, bool ceil, Out out),
   out = at::max_pool3d_with_indices_backward(grad, self, kernel, stride, padding, dilation, ceil, indices.to(at::kLong)))
OP(aclnnMaxUnpool2d, (Tensor self, Tensor indices, Ints size, Out out), out = at::max_unpool2d(self, indices, size))
OP(aclnnMaxUnpool3d, (Tensor self, Tensor indices, Ints size, Ints stride, Ints padding, Out out),
   out = at::max_unpool3d(self, indices, size, stride, padding))

OP(aclnnGridSampler2D, (Tensor input, Tensor grid, int64_t interpolation, int64_t padding, bool align, Out out),
   out = at::grid_sampler_2d(input, grid, interpolation, padding, align))
OP(aclnnGridSampler3D, (Tensor input, Tensor grid, int64_t interpolation, int64_t padding, bool align, Out out),
   out = at::grid_sampler_3d(input, grid, interpolation, padding, align))
OP(aclnnGridSampler2DBackward, (Tensor grad, Tensor input, Tensor grid, int64_t interpolation, int64_t padding, bool align, Bools mask, Out dinput,
                              Out dgrid),
   std::tie(dinput, dgrid) = at::grid_sampler_2d_backward(grad, input, grid, interpolation, padding, align, {mask[0], mask[1]}))
OP(aclnnGridSampler3DBackward, (Tensor grad, Tensor input, Tensor grid, int64_t interpolation, int64_t padding, bool align, Bools mask, Out dinput,
                              Out dgrid),
   std::tie(dinput, dgrid) = at::grid_sampler_3d_backward(grad, input, grid, interpolation, padding, align, {mask[0], mask[1]}))
OP(aclnnAffineGrid, (Tensor theta, Ints size, bool align, Out out), out = at::affine_grid_generator(theta, size, align))

// By the number of dimensions: the scales that torch_npu passes. Modes that interpolate take `align` before them.
#define UPSAMPLE_1D(NAME, FUNCTION)                                                                                       \
    OP(aclnnUpsample##NAME, (Tensor self, Ints size, double w, Out out), out = FUNCTION(self, size, some(w)))             \
    UPSAMPLE_1D_BACKWARD(NAME, FUNCTION)
#define UPSAMPLE_1D_BACKWARD(NAME, FUNCTION)                                                                              \
    OP(aclnnUpsample##NAME##Backward, (Tensor grad, Ints size, Ints input, double w, Out out),                            \
       out = FUNCTION##_backward(grad, size, input, some(w)))
#define UPSAMPLE_2D(NAME, FUNCTION)                                                                                       \
    OP(aclnnUpsample##NAME, (Tensor self, Ints size, double h, double w, Out out), out = FUNCTION(self, size, some(h), some(w))) \
    UPSAMPLE_2D_BACKWARD(NAME, FUNCTION)
#define UPSAMPLE_2D_BACKWARD(NAME, FUNCTION)                                                                              \
    OP(aclnnUpsample##NAME##Backward, (Tensor grad, Ints size, Ints input, double h, double w, Out out),                  \
       out = FUNCTION##_backward(grad, size, input, some(h), some(w)))
#define UPSAMPLE_3D(NAME, FUNCTION)                                                                                       \
    OP(aclnnUpsample##NAME, (Tensor self, Ints size, double d, double h, double w, Out out),                              \
       out = FUNCTION(self, size, some(d), some(h), some(w)))                                                             \
    OP(aclnnUpsample##NAME##Backward, (Tensor grad, Ints size, Ints input, double d, double h, double w, Out out),        \
       out = FUNCTION##_backward(grad, size, input, some(d), some(h), some(w)))
#define INTERPOLATE_2D(NAME, BACKWARD, FUNCTION)                                                                          \
    OP(aclnnUpsample##NAME, (Tensor self, Ints size, bool align, double h, double w, Out out),                            \
       out = FUNCTION(self, size, align, some(h), some(w)))                                                               \
    OP(aclnnUpsample##BACKWARD, (Tensor grad, Ints size, Ints input, bool align, double h, double w, Out out),            \
       out = FUNCTION##_backward(grad, size, input, align, some(h), some(w)))
OP(aclnnUpsampleNearest1d, (Tensor self, Ints size, Out out), out = at::upsample_nearest1d(self, size))
OP(aclnnUpsampleNearest2d, (Tensor self, Ints size, Out out), out = at::upsample_nearest2d(self, size))
UPSAMPLE_1D_BACKWARD(Nearest1d, at::upsample_nearest1d)
UPSAMPLE_2D_BACKWARD(Nearest2d, at::upsample_nearest2d)
UPSAMPLE_3D(Nearest3d, at::upsample_nearest3d)
UPSAMPLE_1D(NearestExact1d, at::_upsample_nearest_exact1d)
UPSAMPLE_2D(NearestExact2d, at::_upsample_nearest_exact2d)
UPSAMPLE_3D(NearestExact3d, at::_upsample_nearest_exact3d)
INTERPOLATE_2D(Bilinear2d, Bilinear2dBackward, at::upsample_bilinear2d)
INTERPOLATE_2D(Bilinear2dAA, Bilinear2dAABackward, at::_upsample_bilinear2d_aa)
INTERPOLATE_2D(Bicubic2d, Bicubic2dBackward, at::upsample_bicubic2d)
INTERPOLATE_2D(Bicubic2dAA, Bicubic2dAAGrad, at::_upsample_bicubic2d_aa)
OP(aclnnUpsampleLinear1d, (Tensor self, Ints size, bool align, double w, Out out), out = at::upsample_linear1d(self, size, align, some(w)))
OP(aclnnUpsampleLinear1dBackward, (Tensor grad, Ints size, Ints input, bool align, double w, Out out),
   out = at::upsample_linear1d_backward(grad, size, input, align, some(w)))
OP(aclnnUpsampleTrilinear3d, (Tensor self, Ints size, bool align, double d, double h, double w, Out out),
   out = at::upsample_trilinear3d(self, size, align, some(d), some(h), some(w)))
OP(aclnnUpsampleTrilinear3dBackward, (Tensor grad, Ints size, Ints input, bool align, double d, double h, double w, Out out),
   out = at::upsample_trilinear3d_backward(grad, size, input, align, some(d), some(h), some(w)))
