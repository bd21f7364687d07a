// The operators of the simulated CANN (libopapi.so): how one is defined, and how its arguments arrive.
//
// torch_npu looks up two functions of each operator: aclnnXGetWorkspaceSize takes the arguments and makes an executor,
// aclnnX puts the executor on a stream. Here an executor is a closure over CPU tensors that alias the device's memory,
// and an operator is a line:
//
//     OP(aclnnAdd, (Tensor self, Tensor other, Scalar alpha, Out out), out = at::add(self, other, alpha))
//
// The parameters are the C function's: the types below say how each crosses it. torch_npu calls through untyped
// pointers, so every handle is checked: a wrong one stops the process, which names the operator and the argument.
#ifndef NPUSIM_OPAPI_H  // and no `#pragma once`: this header is precompiled, and is then found at two places
#define NPUSIM_OPAPI_H

#include "sim.h"

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// The names are CANN's, which declares these types in headers that the torch_npu wheel does not carry.
struct aclTensor : npusim::Tagged {
    static constexpr const char* kind = "aclTensor";
    explicit aclTensor(at::Tensor alias) : Tagged(kind), alias(std::move(alias)) {}
    at::Tensor alias;
    std::vector<int64_t> found;  // the shape that a Found argument was given, for aclGetViewShape
};

struct aclScalar : npusim::Tagged {
    static constexpr const char* kind = "aclScalar";
    explicit aclScalar(at::Scalar value) : Tagged(kind), value(value) {}
    const at::Scalar value;
};

namespace npusim {

template <class Self, class T>
struct Array : Tagged {
    Array(const T* values, uint64_t size) : Tagged(Self::kind), values(values, values + size) {}
    const std::vector<T> values;
};

}  // namespace npusim

#define ARRAY(NAME, ELEMENT)                             \
    struct NAME : npusim::Array<NAME, ELEMENT> {         \
        static constexpr const char* kind = #NAME;       \
        using Array::Array;                              \
    };
ARRAY(aclIntArray, int64_t)
ARRAY(aclFloatArray, float)
ARRAY(aclBoolArray, bool)
ARRAY(aclTensorList, const aclTensor*)
ARRAY(aclScalarList, const aclScalar*)
#undef ARRAY

struct aclOpExecutor : npusim::Tagged {
    static constexpr const char* kind = "aclOpExecutor";
    aclOpExecutor(const char* name, std::function<void()> task) : Tagged(kind), name(name), task(std::move(task)) {}
    const char* const name;
    std::function<void()> task;
};

namespace npusim {

using Tensor = at::Tensor;  // undefined where null was given
using Scalar = at::Scalar;
using MaybeScalar = std::optional<Scalar>;
using Ints = std::vector<int64_t>;  // empty where null was given, as are all lists
using Floats = std::vector<float>;
using Bools = std::vector<bool>;
using Tensors = std::vector<Tensor>;
using Scalars = std::vector<Scalar>;
using DType = at::ScalarType;
using Text = std::string;

/// An input that the hardware takes in float32, float16 and bfloat16 only. CPU kernels take more.
struct Float : Tensor {};

/// An input that the hardware takes in float16 and bfloat16 only.
struct Half : Tensor {};

/// A tensor to write. Assigning copies into its memory, converts the dtype, and fails for another shape; nothing
/// happens where null was given.
struct Out : Tensor {
    void operator=(const Tensor& value) const;
    Out& operator=(const Out&) = delete;
};

/// An output whose shape depends on the data (aclnnNonzero): it has the memory for the largest result, and torch_npu
/// asks for the shape after the operator ran.
struct Found {
    void operator=(const Tensor& value) const;
    Tensor memory;
    aclTensor* handle;
};

/// Outputs, each assigned the value at its place.
struct Outs : std::vector<Out> {
    void operator=(const Tensors& values) const;
};

/// The bits from `first` on as a tensor of this shape, 0 or 1: eight to a byte, the lowest first, as dropout masks have them.
Tensor unpack_bits(const Tensor& bits, int64_t first, at::IntArrayRef shape);

struct Signature {
    const char* name;
    const char* parameters;
};

/// An argument's place, for what is said about a wrong one.
struct Place {
    const Signature& signature;
    int position;
    std::string describe() const;
};

/// Thrown while arguments are taken: what the operator does not accept. GetWorkspaceSize returns it as an error.
struct Refused : std::runtime_error { using runtime_error::runtime_error; };

template <class Handle>
void check(const Handle* handle, const Place& place) {
    const char* kind = Tagged::describe(handle);
    if (std::strcmp(kind, Handle::kind) != 0) misuse(place.describe() + " is an " + Handle::kind + ", and what came is " + kind);
}

DType dtype_of(aclDataType type);

/// Argument<V>: the C type in which a V arrives, and `take`, which makes the V of it. The general case is a number.
template <class V>
struct Argument {
    static_assert(std::is_arithmetic_v<V>);
    using C = V;
    static V take(V value, const Place&) { return value; }
};

template <>
struct Argument<DType> {
    using C = aclDataType;
    static DType take(aclDataType type, const Place&) { return dtype_of(type); }
};

template <>
struct Argument<Text> {
    using C = const char*;
    static Text take(const char* text, const Place&) { return text == nullptr ? "" : text; }
};

template <>
struct Argument<Tensor> {
    using C = const aclTensor*;
    static Tensor take(const aclTensor* handle, const Place& place) {
        if (handle == nullptr) return {};
        check(handle, place);
        return handle->alias;
    }
};

template <>
struct Argument<Float> {
    using C = const aclTensor*;
    static Float take(const aclTensor* handle, const Place& place);
};

template <>
struct Argument<Half> {
    using C = const aclTensor*;
    static Half take(const aclTensor* handle, const Place& place);
};

template <>
struct Argument<Out> {
    using C = const aclTensor*;
    static Out take(const aclTensor* handle, const Place& place) { return Out{Argument<Tensor>::take(handle, place)}; }
};

template <>
struct Argument<Found> {
    using C = aclTensor*;
    static Found take(aclTensor* handle, const Place& place) { return {Argument<Tensor>::take(handle, place), handle}; }
};

template <>
struct Argument<MaybeScalar> {
    using C = const aclScalar*;
    static MaybeScalar take(const aclScalar* handle, const Place& place) {
        if (handle == nullptr) return {};
        check(handle, place);
        return handle->value;
    }
};

template <>
struct Argument<Scalar> {
    using C = const aclScalar*;
    static Scalar take(const aclScalar* handle, const Place& place) {
        check(handle, place);
        return handle->value;
    }
};

/// A list: of the array's values as they are, or of what they are handles of.
template <class Handle, class V>
struct ListArgument {
    using C = const Handle*;
    static V take(const Handle* handle, const Place& place) {
        V list;
        if (handle == nullptr) return list;
        check(handle, place);
        using Element = typename V::value_type;
        for (const auto& value : handle->values) {
            if constexpr (std::is_arithmetic_v<Element>) list.push_back(value);
            else list.push_back(Argument<Element>::take(value, place));
        }
        return list;
    }
};
template <> struct Argument<Ints> : ListArgument<aclIntArray, Ints> {};
template <> struct Argument<Floats> : ListArgument<aclFloatArray, Floats> {};
template <> struct Argument<Bools> : ListArgument<aclBoolArray, Bools> {};
template <> struct Argument<Tensors> : ListArgument<aclTensorList, Tensors> {};
template <> struct Argument<Outs> : ListArgument<aclTensorList, Outs> {};
template <> struct Argument<Scalars> : ListArgument<aclScalarList, Scalars> {};

aclError refuse(const Signature& signature, const std::exception& reason);
aclError launch(const Signature& signature, aclOpExecutor* executor, aclrtStream stream);

template <class... V>
aclError prepare(const Signature& signature, void (*kernel)(V...), uint64_t* workspace_size, aclOpExecutor** executor,
                 typename Argument<V>::C... values) {
    try {
        int position = 0;
        std::tuple<V...> arguments{Argument<V>::take(values, {signature, ++position})...};  // braces: left to right
        *workspace_size = 0;
        *executor = new aclOpExecutor(signature.name, [kernel, arguments = std::move(arguments)] { std::apply(kernel, arguments); });
        return ACL_SUCCESS;
    } catch (const std::exception& reason) {
        return refuse(signature, reason);
    }
}

template <auto kernel, const Signature& signature>
struct Operator;

template <class... V, void (*kernel)(V...), const Signature& signature>
struct Operator<kernel, signature> {
    static aclError get_workspace_size(typename Argument<V>::C... values, uint64_t* workspace_size, aclOpExecutor** executor) {
        return prepare<V...>(signature, kernel, workspace_size, executor, values...);
    }
};

}  // namespace npusim

// GetWorkspaceSize's type follows from the parameters, and no C++ declaration can be made of a type so computed; an
// indirect function (ifunc) has the address that its resolver returns, whatever the type.
#define OP(NAME, PARAMETERS, ...)                                                                              \
    static void NAME##_kernel PARAMETERS { __VA_ARGS__; }                                                      \
    static constexpr npusim::Signature NAME##_signature{#NAME, #PARAMETERS};                                   \
    extern "C" {                                                                                               \
    __attribute__((used)) static auto NAME##_resolve() {                                                       \
        return reinterpret_cast<void (*)()>(&npusim::Operator<NAME##_kernel, NAME##_signature>::get_workspace_size); \
    }                                                                                                          \
    __attribute__((visibility("default"), ifunc(#NAME "_resolve"))) void NAME##GetWorkspaceSize();             \
    __attribute__((visibility("default")))                                                                     \
    aclError NAME(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {                              \
        return npusim::launch(NAME##_signature, executor, stream);                                             \
    }                                                                                                          \
    }

#endif  // NPUSIM_OPAPI_H
