// Operators that move elements: gather and scatter, joining, padding, triangles; and those that make tensors.
#include "opapi.h"

using namespace npusim;

namespace {

/// An empty vector stands for a dimension that is taken whole. An index that is truly empty looks the same, and leaves nothing to do.
c10::List<std::optional<Tensor>> indices_of(const Tensors& indices) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& index : indices) {
        const bool whole = !index.defined() || (index.dim() == 1 && index.numel() == 0);
        list.push_back(whole ? std::nullopt : std::optional(index));
    }
    return list;
}

Tensor scatter(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, int64_t reduction) {
    return reduction == 0 ? at::scatter(self, dim, index, source) : at::scatter(self, dim, index, source, reduction == 1 ? "add" : "multiply");
}

Tensor scatter(const Tensor& self, int64_t dim, const Tensor& index, const Scalar& value, int64_t reduction) {
    return reduction == 0 ? at::scatter(self, dim, index, value) : at::scatter(self, dim, index, value, reduction == 1 ? "add" : "multiply");
}

Tensor scatter_reduce(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, int64_t reduction, bool include_self) {
    constexpr const char* kNames[] = {"", "sum", "prod", "amax", "amin", "mean"};
    return at::scatter_reduce(self, dim, index, source, kNames[reduction], include_self);
}

Tensor longs(const Ints& values) { return at::tensor(values, at::kLong); }

/// A range computed in the output's own precision.
Tensor range(const Scalar& start, const Scalar& step, const Tensor& out) {
    if (at::isIntegralType(out.scalar_type(), false)) return at::arange(out.numel(), at::kLong) * step + start;
    return at::arange(out.numel(), at::kDouble) * step.toDouble() + start.toDouble();
}

}  // namespace

OP(aclnnGather, (Tensor self, int64_t dim, Tensor index, Out out), out = at::gather(self, dim, index))
OP(aclnnIndexSelect, (Tensor self, int64_t dim, Tensor index, Out out), out = at::index_select(self, dim, index).view_as(out))
OP(aclnnIndex, (Tensor self, Tensors indices, Out out), if (out.numel() > 0) out = at::index(self, indices_of(indices)))
OP(aclnnIndexPutImpl, (Out self, Tensors indices, Tensor value, bool accumulate, bool), self.index_put_(indices_of(indices), value, accumulate))
OP(aclnnIndexAdd, (Tensor self, int64_t dim, Tensor index, Tensor source, Scalar alpha, Out out),
   out = at::index_add(self, dim, index, source, alpha))
OP(aclnnIndexCopy, (Tensor self, int64_t dim, Tensor index, Tensor source, Out out), out = at::index_copy(self, dim, index, source))
OP(aclnnInplaceIndexCopy, (Out self, int64_t dim, Tensor index, Tensor source), self = at::index_copy(self, dim, index, source))
OP(aclnnIndexFill, (Tensor self, int64_t dim, Tensor index, Scalar value, Out out), out = at::index_fill(self, dim, index, value))
OP(aclnnInplaceIndexFill, (Out self, int64_t dim, Tensor index, Scalar value), self = at::index_fill(self, dim, index, value))
OP(aclnnIndexFillTensor, (Tensor self, int64_t dim, Ints index, Scalar value, Out out), out = at::index_fill(self, dim, longs(index), value))
OP(aclnnInplaceIndexFillTensor, (Out self, int64_t dim, Ints index, Scalar value), self = at::index_fill(self, dim, longs(index), value))
OP(aclnnScatter, (Tensor self, int64_t dim, Tensor index, Tensor source, int64_t reduction, Out out),
   out = scatter(self, dim, index, source, reduction))
OP(aclnnInplaceScatter, (Out self, int64_t dim, Tensor index, Tensor source, int64_t reduction),
   self = scatter(self, dim, index, source, reduction))
OP(aclnnScatterValue, (Tensor self, int64_t dim, Tensor index, Scalar value, int64_t reduction, Out out),
   out = scatter(self, dim, index, value, reduction))
OP(aclnnInplaceScatterValue, (Out self, int64_t dim, Tensor index, Scalar value, int64_t reduction),
   self = scatter(self, dim, index, value, reduction))
OP(aclnnScatterAdd, (Tensor self, int64_t dim, Tensor index, Tensor source, Out out), out = at::scatter_add(self, dim, index, source))
OP(aclnnScatterReduce, (Tensor self, int64_t dim, Tensor index, Tensor source, int64_t reduction, bool include_self, Out out),
   out = scatter_reduce(self, dim, index, source, reduction, include_self))
OP(aclnnInplaceScatterReduce, (Out self, int64_t dim, Tensor index, Tensor source, int64_t reduction, bool include_self),
   self = scatter_reduce(self, dim, index, source, reduction, include_self))
OP(aclnnTake, (Tensor self, Tensor index, Out out), out = at::take(self, index))
OP(aclnnInplacePut, (Out self, Tensor index, Tensor source, bool accumulate), self = at::put(self, index, source, accumulate))
OP(aclnnMaskedSelect, (Tensor self, Tensor mask, Found out), out = at::masked_select(self, mask))
OP(aclnnNonzero, (Tensor self, Found out), out = at::nonzero(self))
OP(aclnnNonzeroV2, (Tensor self, Found out), out = at::nonzero(self).t().contiguous())

OP(aclnnCat, (Tensors tensors, int64_t dim, Out out), out = at::cat(tensors, dim))
OP(aclnnStack, (Tensors tensors, int64_t dim, Out out), out = at::stack(tensors, dim))
OP(aclnnSplitWithSize, (Tensor self, Ints sizes, int64_t dim, Outs out), out = at::split_with_sizes(self, sizes, dim))
OP(aclnnChunkCat, (Tensors tensors, int64_t dim, int64_t chunks, Out out), out = at::_chunk_cat(tensors, dim, chunks))
OP(aclnnRepeat, (Tensor self, Ints repeats, Out out), out = self.repeat(repeats))
OP(aclnnRepeatInterleave, (Tensor self, Tensor repeats, int64_t, Out out), out = at::repeat_interleave(self, repeats))
OP(aclnnRepeatInterleaveWithDim, (Tensor self, Tensor repeats, int64_t dim, int64_t, Out out), out = at::repeat_interleave(self, repeats, dim))
OP(aclnnRepeatInterleaveInt, (Tensor self, int64_t repeats, int64_t, Out out), out = at::repeat_interleave(self, repeats))
OP(aclnnRepeatInterleaveIntWithDim, (Tensor self, int64_t repeats, int64_t dim, int64_t, Out out),
   out = at::repeat_interleave(self, repeats, dim))
OP(aclnnRepeatInterleaveTensor, (Tensor repeats, int64_t, Out out), out = at::repeat_interleave(repeats))
OP(aclnnRepeatInterleaveGrad, (Tensor grad, Tensor repeats, int64_t dim, Out out), {
    const auto source = at::repeat_interleave(repeats.numel() == 1 ? repeats.reshape({1}).expand(out.size(dim)) : repeats);
    out = at::zeros_like(out).index_add(dim, source, grad);
})
OP(aclnnFlip, (Tensor self, Ints dims, Out out), out = at::flip(self, dims))
OP(aclnnRoll, (Tensor self, Ints shifts, Ints dims, Out out), out = at::roll(self, shifts, dims))
OP(aclnnTril, (Tensor self, int64_t diagonal, Out out), out = at::tril(self, diagonal))
OP(aclnnTriu, (Tensor self, int64_t diagonal, Out out), out = at::triu(self, diagonal))
OP(aclnnInplaceTril, (Out self, int64_t diagonal), self = at::tril(self, diagonal))
OP(aclnnInplaceTriu, (Out self, int64_t diagonal), self = at::triu(self, diagonal))
OP(aclnnChannelShuffle, (Tensor self, int64_t groups, Out out), out = at::native_channel_shuffle(self, groups))
OP(aclnnUnfoldGrad, (Tensor grad, Ints sizes, int64_t dim, int64_t size, int64_t step, Out out),
   out = at::unfold_backward(grad, sizes, dim, size, step))
OP(aclnnIm2col, (Tensor self, Ints kernel, Ints dilation, Ints padding, Ints stride, Out out),
   out = at::im2col(self, kernel, dilation, padding, stride))
OP(aclnnIm2colBackward, (Tensor self, Ints size, Ints kernel, Ints dilation, Ints padding, Ints stride, Out out),
   out = at::col2im(self, size, kernel, dilation, padding, stride))

OP(aclnnConstantPadNd, (Tensor self, Ints padding, Scalar value, Out out), out = at::constant_pad_nd(self, padding, value))
#define PAD(NAME, FUNCTION)                                                                   \
    OP(aclnn##NAME, (Tensor self, Ints padding, Out out), out = FUNCTION(self, padding))      \
    OP(aclnn##NAME##Backward, (Tensor grad, Tensor self, Ints padding, Out out), out = FUNCTION##_backward(grad, self, padding))
PAD(ReflectionPad1d, at::reflection_pad1d)
PAD(ReflectionPad2d, at::reflection_pad2d)
PAD(ReflectionPad3d, at::reflection_pad3d)
PAD(ReplicationPad1d, at::replication_pad1d)
PAD(ReplicationPad2d, at::replication_pad2d)
PAD(ReplicationPad3d, at::replication_pad3d)

OP(aclnnArange, (Scalar start, Scalar, Scalar step, Out out), out = range(start, step, out))
OP(aclnnRange, (Scalar start, Scalar, Scalar step, Out out), out = range(start, step, out))
OP(aclnnLinspace, (Scalar start, Scalar end, int64_t steps, Out out), out = at::linspace(start, end, steps, out.options()))
OP(aclnnLogSpace, (Scalar start, Scalar end, int64_t steps, double base, Out out), out = at::logspace(start, end, steps, base, out.options()))
OP(aclnnEye, (int64_t rows, int64_t columns, Out out), out = at::eye(rows, columns, out.options()))
OP(aclnnOneHot, (Tensor self, int64_t depth, Tensor on, Tensor off, int64_t axis, Out out), {
    const auto classes = at::arange(depth).to(self.scalar_type());
    const auto hot = at::eq(self.unsqueeze(-1), classes).movedim(-1, axis);
    out = at::where(hot, on.reshape({}), off.reshape({}));
})
