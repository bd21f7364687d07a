// The handles of libopapi.so, and what all operators share.
#include "opapi.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <array>

namespace npusim {
namespace {

constexpr aclError kParameterInvalid = 161002;  // ACLNN_ERR_PARAM_INVALID

constexpr std::array<std::pair<aclDataType, DType>, 15> kDTypes{{
    {ACL_FLOAT, at::kFloat}, {ACL_FLOAT16, at::kHalf}, {ACL_BF16, at::kBFloat16}, {ACL_DOUBLE, at::kDouble},
    {ACL_INT8, at::kChar}, {ACL_INT16, at::kShort}, {ACL_INT32, at::kInt}, {ACL_INT64, at::kLong},
    {ACL_UINT8, at::kByte}, {ACL_UINT16, at::kUInt16}, {ACL_UINT32, at::kUInt32}, {ACL_UINT64, at::kUInt64},
    {ACL_BOOL, at::kBool}, {ACL_COMPLEX64, at::kComplexFloat}, {ACL_COMPLEX128, at::kComplexDouble},
}};

template <class Handle>
aclError destroy(const Handle* handle, const char* call) {
    if (handle != nullptr) delete &checked<Handle>(handle, call);
    return ACL_SUCCESS;
}

template <class List, class Member>
aclError destroy_members(const List* list, const char* call, aclError (*destroy_member)(const Member*)) {
    if (list != nullptr) std::for_each(list->values.begin(), list->values.end(), destroy_member);
    return destroy(list, call);
}

}  // namespace

std::string Place::describe() const {
    return "argument " + std::to_string(position) + " of " + signature.name + signature.parameters;
}

DType dtype_of(aclDataType type) {
    const auto* found = std::find_if(kDTypes.begin(), kDTypes.end(), [&](const auto& pair) { return pair.first == type; });
    if (found == kDTypes.end()) unsimulated(("aclDataType " + std::to_string(type)).c_str());
    return found->second;
}

void Out::operator=(const Tensor& value) const {
    if (!defined()) return;
    TORCH_CHECK(sizes() == value.sizes(), "the output has shape ", sizes(), " and the result ", value.sizes());
    copy_(value);
}

void Found::operator=(const Tensor& value) const {
    if (!memory.defined()) return;
    memory.flatten().narrow(0, 0, value.numel()).copy_(value.flatten());
    handle->found = value.sizes().vec();
}

void Outs::operator=(const Tensors& values) const {
    TORCH_CHECK(size() == values.size(), "there are ", size(), " outputs and ", values.size(), " results");
    for (size_t i = 0; i < size(); ++i) (*this)[i] = values[i];
}

namespace {
Tensor take_one_of(const aclTensor* handle, const Place& place, std::initializer_list<DType> accepted, const char* names) {
    const Tensor tensor = Argument<Tensor>::take(handle, place);
    if (!tensor.defined() || std::count(accepted.begin(), accepted.end(), tensor.scalar_type()) > 0) return tensor;
    throw Refused(place.describe() + " is " + names + ", and not " + at::toString(tensor.scalar_type()));
}
}  // namespace

Float Argument<Float>::take(const aclTensor* handle, const Place& place) {
    return Float{take_one_of(handle, place, {at::kFloat, at::kHalf, at::kBFloat16}, "float32, float16 or bfloat16")};
}

Half Argument<Half>::take(const aclTensor* handle, const Place& place) {
    return Half{take_one_of(handle, place, {at::kHalf, at::kBFloat16}, "float16 or bfloat16")};
}

aclError refuse(const Signature& signature, const std::exception& reason) {
    return fail(kParameterInvalid, std::string(signature.name) + ": " + reason.what());
}

aclError launch(const Signature& signature, aclOpExecutor* executor, aclrtStream stream) {
    auto& ready = checked<aclOpExecutor>(executor, signature.name);
    if (std::strcmp(ready.name, signature.name) != 0) misuse(std::string(signature.name) + " got an executor of " + ready.name);
    enqueue(stream, [task = std::move(ready.task)] {
        at::AutoDispatchBelowADInplaceOrView no_autograd;
        task();
    }, signature.name);
    delete executor;
    return ACL_SUCCESS;
}

}  // namespace npusim

using npusim::destroy;

NPUSIM_EXPORT aclTensor* aclCreateTensor(const int64_t* shape, uint64_t dims, aclDataType type, const int64_t* strides, int64_t offset,
                                         aclFormat format, const int64_t*, uint64_t, void* data) {
    if (format > ACL_FORMAT_ND && format != ACL_FORMAT_NCDHW && format != ACL_FORMAT_NCL)
        npusim::unsimulated(("aclFormat " + std::to_string(format)).c_str());
    const auto dtype = npusim::dtype_of(type);
    auto* first = static_cast<char*>(data) + offset * static_cast<int64_t>(c10::elementSize(dtype));
    auto alias = at::from_blob(first, {shape, dims}, {strides, dims}, dtype);
    alias.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(false);  // an operator must not resize its output
    return new aclTensor(std::move(alias));
}

NPUSIM_EXPORT aclScalar* aclCreateScalar(void* value, aclDataType type) {
    return new aclScalar(at::from_blob(value, {}, npusim::dtype_of(type)).item());
}

NPUSIM_EXPORT aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) { return new aclIntArray(values, size); }
NPUSIM_EXPORT aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) { return new aclFloatArray(values, size); }
NPUSIM_EXPORT aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) { return new aclBoolArray(values, size); }
NPUSIM_EXPORT aclTensorList* aclCreateTensorList(const aclTensor* const* members, uint64_t size) { return new aclTensorList(members, size); }
NPUSIM_EXPORT aclScalarList* aclCreateScalarList(const aclScalar* const* members, uint64_t size) { return new aclScalarList(members, size); }

NPUSIM_EXPORT aclError aclDestroyTensor(const aclTensor* handle) { return destroy(handle, __func__); }
NPUSIM_EXPORT aclError aclDestroyScalar(const aclScalar* handle) { return destroy(handle, __func__); }
NPUSIM_EXPORT aclError aclDestroyIntArray(const aclIntArray* handle) { return destroy(handle, __func__); }
NPUSIM_EXPORT aclError aclDestroyFloatArray(const aclFloatArray* handle) { return destroy(handle, __func__); }
NPUSIM_EXPORT aclError aclDestroyBoolArray(const aclBoolArray* handle) { return destroy(handle, __func__); }
NPUSIM_EXPORT aclError aclDestroyTensorList(const aclTensorList* handle) {
    return npusim::destroy_members(handle, __func__, aclDestroyTensor);  // a list owns its members
}
NPUSIM_EXPORT aclError aclDestroyScalarList(const aclScalarList* handle) {
    return npusim::destroy_members(handle, __func__, aclDestroyScalar);
}

/// The caller frees `shape` with delete[].
NPUSIM_EXPORT aclError aclGetViewShape(const aclTensor* handle, int64_t** shape, uint64_t* dims) {
    const auto& found = npusim::checked<aclTensor>(handle, __func__).found;
    *dims = found.size();
    *shape = std::copy(found.begin(), found.end(), new int64_t[found.size()]) - found.size();
    return ACL_SUCCESS;
}
