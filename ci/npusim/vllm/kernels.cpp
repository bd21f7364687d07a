// libvllm_ascend_kernels.so without device code: the kernels that vllm-ascend's extension launches itself. Those for LoRA
// compute; the others, and the platform's description for operators that compile themselves, stop by name.
#include "stops.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

STOPS(_ZN11vllm_ascend19mla_preprocess_implEPvS0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_j, "vllm-ascend's mla_preprocess")
// With the strings of the old C++ ABI.
STOPS(_ZN2fe13PlatFormInfos13GetLocalMemBwERKNS_12LocalMemTypeERm, "vllm-ascend's PlatFormInfos::GetLocalMemBw")
STOPS(_ZN2fe13PlatFormInfos15GetLocalMemSizeERKNS_12LocalMemTypeERm, "vllm-ascend's PlatFormInfos::GetLocalMemSize")
STOPS(_ZN2fe13PlatFormInfos20SetCoreNumByCoreTypeERKSs, "vllm-ascend's PlatFormInfos::SetCoreNumByCoreType")
STOPS(_ZN2fe13PlatFormInfos22GetPlatformResWithLockERKSsS2_RSs, "vllm-ascend's PlatFormInfos::GetPlatformResWithLock")
STOPS(_ZNK2fe13PlatFormInfos10GetCoreNumEv, "vllm-ascend's PlatFormInfos::GetCoreNum")
STOPS(_ZN2fe19PlatformInfoManager24InitRuntimePlatformInfosERKSs, "vllm-ascend's PlatformInfoManager::InitRuntimePlatformInfos")
STOPS(_ZN2fe19PlatformInfoManager31GetRuntimePlatformInfosByDeviceERKjRNS_13PlatFormInfosEb, "vllm-ascend's PlatformInfoManager::GetRuntimePlatformInfosByDevice")
STOPS(_ZN2fe19PlatformInfoManager8InstanceEv, "vllm-ascend's PlatformInfoManager::Instance")

namespace vllm_ascend {

enum struct AscendType { FP16 = 0, BF16 = 1, FP32 = 2 };

namespace {

at::Tensor alias(void* memory, at::IntArrayRef shape, at::ScalarType type) { return at::from_blob(memory, shape, type); }

at::ScalarType torch_type(AscendType type) { return type == AscendType::FP16 ? at::kHalf : type == AscendType::BF16 ? at::kBFloat16 : at::kFloat; }

/// Calls `row(token, adapter)` for each token that has one, on the stream. `lengths` are those of the sequences, whose
/// tokens have one adapter; null where each token has its own.
void for_each_token(void* stream, const char* name, void* adapters, void* lengths, uint32_t count, uint32_t tokens,
                    std::function<void(int64_t, int64_t)> row) {
    npusim::enqueue(stream, [=] {
        at::AutoDispatchBelowADInplaceOrView no_autograd;
        const auto* adapter = static_cast<const int64_t*>(adapters);
        const auto* length = static_cast<const int64_t*>(lengths);
        int64_t token = 0;
        for (uint32_t i = 0; i < count; ++i)
            for (int64_t end = token + (length == nullptr ? 1 : length[i]); token < end && token < tokens; ++token)
                if (adapter[i] >= 0) row(token, adapter[i]);
    }, name);
}

void shrink(AscendType type, void* stream, const char* name, void* x, void* weight, void* adapters, void* lengths, uint32_t count, void* y,
            uint32_t tokens, uint32_t width, uint32_t rank, float scale) {
    for_each_token(stream, name, adapters, lengths, count, tokens, [=](int64_t token, int64_t adapter) {
        const auto a = alias(weight, {adapter + 1, rank, width}, torch_type(type))[adapter].to(at::kFloat);
        const auto from = alias(x, {tokens, width}, torch_type(type))[token].to(at::kFloat);
        alias(y, {tokens, rank}, at::kFloat)[token].copy_(a.mv(from) * scale);
    });
}

void expand(AscendType type, void* stream, const char* name, void* x, void* weight, void* adapters, void* lengths, uint32_t count, void* y,
            uint32_t tokens, uint32_t rank, uint32_t width, uint32_t offset, uint32_t full) {
    for_each_token(stream, name, adapters, lengths, count, tokens, [=](int64_t token, int64_t adapter) {
        const auto b = alias(weight, {adapter + 1, width, rank}, torch_type(type))[adapter].to(at::kFloat);
        const auto from = alias(x, {tokens, rank}, at::kFloat)[token];
        alias(y, {tokens, full}, torch_type(type))[token].narrow(0, offset, width).add_(b.mv(from));
    });
}

}  // namespace

extern void bgmv_shrink_impl(AscendType type, void* stream, void* x, void* weight, void* adapters, uint32_t count, void* y, uint32_t tokens,
                             uint32_t, uint32_t width, uint32_t rank, float scale) {
    shrink(type, stream, __func__, x, weight, adapters, nullptr, count, y, tokens, width, rank, scale);
}

extern void sgmv_shrink_impl(AscendType type, void* stream, void* x, void* weight, void* adapters, uint32_t count, void* lengths, uint32_t,
                             void* y, uint32_t tokens, uint32_t, uint32_t width, uint32_t rank, float scale) {
    shrink(type, stream, __func__, x, weight, adapters, lengths, count, y, tokens, width, rank, scale);
}

extern void bgmv_expand_impl(AscendType type, void* stream, void* x, void* weight, void* adapters, uint32_t count, void* y, void*,
                             uint32_t tokens, uint32_t, uint32_t rank, uint32_t width, uint32_t offset, uint32_t full) {
    expand(type, stream, __func__, x, weight, adapters, nullptr, count, y, tokens, rank, width, offset, full);
}

extern void sgmv_expand_impl(AscendType type, void* stream, void* x, void* weight, void* adapters, uint32_t count, void* lengths, uint32_t,
                             void* y, void*, uint32_t tokens, uint32_t, uint32_t rank, uint32_t width, uint32_t offset, uint32_t full) {
    expand(type, stream, __func__, x, weight, adapters, lengths, count, y, tokens, rank, width, offset, full);
}

}  // namespace vllm_ascend
