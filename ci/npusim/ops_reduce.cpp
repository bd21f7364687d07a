// Reductions, scans, sorting and counting.
#include "opapi.h"

using namespace npusim;

namespace {

at::OptionalIntArrayRef some(const Ints& dims) { return dims.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(dims); }

Tensor any_or_all(const Tensor& self, const Ints& dims, bool keepdim, Tensor (*function)(const Tensor&, at::OptionalIntArrayRef, bool)) {
    return function(self, some(dims), keepdim);
}

/// {values, inverse, counts} of a function with torch's signature for unique.
void assign(const std::tuple<Tensor, Tensor, Tensor>& found, const Found& values, const Out& inverse, const Found& counts) {
    values = std::get<0>(found);
    if (inverse.defined() && inverse.numel() > 0) inverse = std::get<1>(found);
    if (counts.memory.defined() && counts.memory.numel() > 0) counts = std::get<2>(found);
}

}  // namespace

OP(aclnnReduceSum, (Tensor self, Ints dims, bool keepdim, DType dtype, Out out), out = at::sum(self, some(dims), keepdim, dtype))
OP(aclnnReduceNansum, (Tensor self, Ints dims, bool keepdim, DType dtype, Out out), out = at::nansum(self, some(dims), keepdim, dtype))
OP(aclnnMean, (Tensor self, Ints dims, bool keepdim, DType dtype, Out out), out = at::mean(self, some(dims), keepdim, dtype))
OP(aclnnProd, (Tensor self, DType dtype, Out out), out = at::prod(self, dtype))
OP(aclnnProdDim, (Tensor self, int64_t dim, bool keepdim, DType dtype, Out out), out = at::prod(self, dim, keepdim, dtype))
OP(aclnnAll, (Tensor self, Ints dims, bool keepdim, Out out), out = any_or_all(self, dims, keepdim, at::all))
OP(aclnnAny, (Tensor self, Ints dims, bool keepdim, Out out), out = any_or_all(self, dims, keepdim, at::any))
OP(aclnnAmax, (Tensor self, Ints dims, bool keepdim, Out out), out = at::amax(self, dims, keepdim))
OP(aclnnAmin, (Tensor self, Ints dims, bool keepdim, Out out), out = at::amin(self, dims, keepdim))
OP(aclnnAminmaxAll, (Tensor self, Out min, Out max), std::tie(min, max) = at::aminmax(self))
OP(aclnnAminmaxDim, (Tensor self, int64_t dim, bool keepdim, Out min, Out max), std::tie(min, max) = at::aminmax(self, dim, keepdim))
OP(aclnnAminmax, (Tensor self, Ints dims, bool keepdim, Out min, Out max),
   min = at::amin(self, dims, keepdim), max = at::amax(self, dims, keepdim))
OP(aclnnMax, (Tensor self, Out out), out = at::max(self))
OP(aclnnMin, (Tensor self, Out out), out = at::min(self))
OP(aclnnMaxDim, (Tensor self, int64_t dim, bool keepdim, Out values, Out indices), std::tie(values, indices) = at::max(self, dim, keepdim))
OP(aclnnMinDim, (Tensor self, int64_t dim, bool keepdim, Out values, Out indices), std::tie(values, indices) = at::min(self, dim, keepdim))
OP(aclnnArgMax, (Tensor self, int64_t dim, bool keepdim, Out out), out = at::argmax(self, dim, keepdim))
OP(aclnnArgMin, (Tensor self, int64_t dim, bool keepdim, Out out), out = at::argmin(self, dim, keepdim))
OP(aclnnMedian, (Tensor self, Out out), out = at::median(self))
OP(aclnnNanMedian, (Tensor self, Out out), out = at::nanmedian(self))
OP(aclnnMedianDim, (Tensor self, int64_t dim, bool keepdim, Out values, Out indices), std::tie(values, indices) = at::median(self, dim, keepdim))
OP(aclnnNanMedianDim, (Tensor self, int64_t dim, bool keepdim, Out values, Out indices),
   std::tie(values, indices) = at::nanmedian(self, dim, keepdim))
OP(aclnnKthvalue, (Tensor self, int64_t k, int64_t dim, bool keepdim, Out values, Out indices),
   std::tie(values, indices) = at::kthvalue(self, k, dim, keepdim))
OP(aclnnStd, (Tensor self, Ints dims, int64_t correction, bool keepdim, Out out), out = at::std(self, some(dims), correction, keepdim))
OP(aclnnStdMeanCorrection, (Tensor self, Ints dims, int64_t correction, bool keepdim, Out std, Out mean),
   std::tie(std, mean) = at::std_mean(self, some(dims), correction, keepdim))
OP(aclnnVarCorrection, (Tensor self, Ints dims, int64_t correction, bool keepdim, Out out), out = at::var(self, some(dims), correction, keepdim))
OP(aclnnVarMean, (Tensor self, Ints dims, int64_t correction, bool keepdim, Out var, Out mean),
   std::tie(var, mean) = at::var_mean(self, some(dims), correction, keepdim))
OP(aclnnLogSumExp, (Tensor self, Ints dims, bool keepdim, Out out), out = at::logsumexp(self, dims, keepdim))
OP(aclnnNorm, (Tensor self, Scalar p, Ints dims, bool keepdim, Out out), out = at::linalg_vector_norm(self, p, some(dims), keepdim))
OP(aclnnLinalgVectorNorm, (Tensor self, Scalar p, Ints dims, bool keepdim, DType dtype, Out out),
   out = at::linalg_vector_norm(self, p, some(dims), keepdim, dtype))
OP(aclnnRenorm, (Tensor self, Scalar p, int64_t dim, Scalar max, Out out), out = at::renorm(self, p, dim, max))
OP(aclnnInplaceRenorm, (Out self, Scalar p, int64_t dim, Scalar max), self = at::renorm(self, p, dim, max))
OP(aclnnTrace, (Tensor self, Out out), out = at::trace(self))

OP(aclnnCumsum, (Tensor self, int64_t dim, DType dtype, Out out), out = at::cumsum(self, dim, dtype))
OP(aclnnCumprod, (Tensor self, Scalar dim, DType dtype, Out out), out = at::cumprod(self, dim.toLong(), dtype))
OP(aclnnCummax, (Tensor self, int64_t dim, Out values, Out indices), std::tie(values, indices) = at::cummax(self, dim))
OP(aclnnCummin, (Tensor self, int64_t dim, Out values, Out indices), std::tie(values, indices) = at::cummin(self, dim))

OP(aclnnSort, (Tensor self, bool stable, int64_t dim, bool descending, Out values, Out indices),
   std::tie(values, indices) = at::sort(self, stable, dim, descending))
OP(aclnnTopk, (Tensor self, int64_t k, int64_t dim, bool largest, bool sorted, Out values, Out indices),
   std::tie(values, indices) = at::topk(self, k, dim, largest, sorted))
OP(aclnnSearchSorted, (Tensor sorted, Tensor self, bool int32, bool right, Tensor sorter, Out out),
   out = at::searchsorted(sorted, self, int32, right, std::nullopt, sorter))
OP(aclnnSearchSorteds, (Tensor sorted, Scalar self, bool int32, bool right, Tensor sorter, Out out),
   out = at::searchsorted(sorted, self, int32, right, std::nullopt, sorter))
OP(aclnnBucketize, (Tensor self, Tensor boundaries, bool int32, bool right, Out out), out = at::bucketize(self, boundaries, int32, right))
OP(aclnnBincount, (Tensor self, Tensor weight, int64_t min_length, Out out), out = at::bincount(self, weight, min_length))
OP(aclnnHistc, (Tensor self, int64_t bins, Scalar min, Scalar max, Out out), out = at::histc(self, bins, min, max))

OP(aclnnUnique, (Tensor self, bool sorted, bool return_inverse, Found values, Out inverse),
   assign(at::_unique2(self, sorted, return_inverse), values, inverse, {}))
OP(aclnnUnique2, (Tensor self, bool sorted, bool return_inverse, bool return_counts, Found values, Out inverse, Found counts),
   assign(at::_unique2(self, sorted, return_inverse || return_counts, return_counts), values, inverse, counts))
OP(aclnnUniqueDim, (Tensor self, bool sorted, bool return_inverse, int64_t dim, Found values, Out inverse, Found counts),
   assign(at::unique_dim(self, dim, sorted, return_inverse, true), values, inverse, counts))
OP(aclnnUniqueConsecutive, (Tensor self, bool return_inverse, bool return_counts, int64_t dim, Found values, Out inverse, Found counts), {
    constexpr int64_t kFlat = 1000;  // op-plugin's sign for no dimension
    assign(at::unique_consecutive(self, return_inverse, return_counts, dim == kFlat ? std::nullopt : std::optional(dim)), values, inverse, counts);
})
