// Devices, contexts, versions and errors; and by name what the wheel refers to but this simulator does not do.
#include "runtime.h"

#include <acl/acl_op_compiler.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <sstream>
#include <vector>

// Opaque to torch_npu, which only builds and destroys them.
struct aclopAttr {};
struct aclTensorDesc {
    size_t item_size;  // 0 is a type that no operator here takes
    int64_t elements;
};
struct aclDataBuffer {
    void* data;
};

namespace npusim {
namespace {

uint64_t number(const char* name, uint64_t fallback) {
    const char* value = std::getenv(name);
    return value != nullptr && *value != '\0' ? std::strtoull(value, nullptr, 10) : fallback;
}

/// "LEFT:N" from the environment; an absent variable leaves both alone.
void split(const char* name, std::string& left, uint64_t& n) {
    const char* value = std::getenv(name);
    if (value == nullptr) return;
    const std::string text = value;
    const size_t colon = text.rfind(':');
    if (colon == std::string::npos) misuse(std::string(name) + "=" + text + " is not of the form WHAT:N");
    left = text.substr(0, colon);
    n = std::strtoull(text.c_str() + colon + 1, nullptr, 10);
}

Config read_config() {
    Config config{};
    config.devices = static_cast<int>(std::min<uint64_t>(number("NPUSIM_DEVICES", 8), kMaxDevices));
    config.memory = number("NPUSIM_MEMORY", 8ull << 30);
    const char* node = std::getenv("NPUSIM_NODE");
    config.node = node != nullptr ? node : "/dev/shm/npusim-" + std::to_string(getuid());
    config.log = static_cast<int>(number("NPUSIM_LOG", 0));
    config.hccl_timeout_s = static_cast<double>(number("NPUSIM_HCCL_TIMEOUT", number("HCCL_EXEC_TIMEOUT", 1836)));
    config.hccl_mild = number("NPUSIM_HCCL_MILD", 0) != 0;
    config.oom_after = number("NPUSIM_FAULT_OOM_AFTER", 0);
    config.oom_at = number("NPUSIM_FAULT_OOM_AT", 0);
    std::string rank = "-1";
    split("NPUSIM_FAULT_EXIT", rank, config.exit_at);
    config.exit_rank = std::atoi(rank.c_str());
    split("NPUSIM_FAULT_OP", config.op_fails, config.op_fails_at);
    return config;
}

/// The physical devices that ASCEND_RT_VISIBLE_DEVICES leaves visible, read as CANN reads it: up to the first word that is
/// no valid id, and none at all unless the ids ascend strictly.
std::vector<int> visible_devices() {
    std::vector<int> visible;
    const char* list = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (list == nullptr) {
        for (int id = 0; id < config().devices; ++id) visible.push_back(id);
        return visible;
    }
    std::stringstream words(list);
    for (std::string word; std::getline(words, word, ',');) {
        char* end = nullptr;
        const long id = std::strtol(word.c_str(), &end, 10);
        if (end == word.c_str() || id < 0 || id >= config().devices) break;
        if (!visible.empty() && id <= visible.back()) return {};
        visible.push_back(static_cast<int>(id));
    }
    return visible;
}

const std::vector<int>& visible() {
    static const auto* devices = new std::vector<int>(visible_devices());
    return *devices;
}

/// The primary context is the only one that a device has.
struct Context : Tagged {
    static constexpr const char* kind = "context";
    Context() : Tagged(kind) {}
    std::atomic<bool> active{false};
    std::atomic<aclError> error{ACL_SUCCESS};
    std::mutex mutex;  // guards what follows
    std::string text;
};

Context* contexts() {
    static auto* all = new Context[kMaxDevices];
    return all;
}

thread_local int current = -1;
thread_local std::string recent_error;

}  // namespace

const Config& config() {
    static const auto* config = new Config(read_config());
    return *config;
}

int current_device() { return current; }
int device_count() { return static_cast<int>(visible().size()); }
int physical_device(int device) { return visible()[device]; }

void unsimulated(const char* what) {
    std::fprintf(stderr, "npusim: %s is not simulated (process %d); how to add it: ci/npusim/README.md\n", what, getpid());
    std::fflush(nullptr);
    _exit(kUnsimulatedStatus);
}

void misuse(const std::string& text) {
    std::fprintf(stderr, "npusim: %s (process %d)\n", text.c_str(), getpid());
    std::fflush(nullptr);
    _exit(kUnsimulatedStatus);
}

aclError fail(aclError code, const std::string& text) {
    recent_error = text;
    trace("error %d: %s", code, text.c_str());
    return code;
}

void trace(const char* format, ...) {
    if (config().log < 2) return;
    char line[512];
    va_list args;
    va_start(args, format);
    std::vsnprintf(line, sizeof line, format, args);
    va_end(args);
    std::fprintf(stderr, "npusim %d: %s\n", getpid(), line);
}

void fail_device(int device, aclError code, const std::string& text) {
    Context& context = contexts()[device];
    std::lock_guard<std::mutex> guard(context.mutex);
    if (context.error != ACL_SUCCESS) return;  // the first error is the cause
    trace("device %d failed with %d: %s", device, code, text.c_str());
    context.text = text;
    context.error = code;
}

bool device_failed(int device) { return contexts()[device].error != ACL_SUCCESS; }

aclError device_error(int device) {
    Context& context = contexts()[device];
    if (context.error == ACL_SUCCESS) return ACL_SUCCESS;
    std::lock_guard<std::mutex> guard(context.mutex);
    return fail(context.error, context.text);
}

}  // namespace npusim

using namespace npusim;

// --- devices and contexts -------------------------------------------------------------------------------------------

NPUSIM_EXPORT aclError aclInit(const char*) { return ACL_SUCCESS; }
NPUSIM_EXPORT aclError aclFinalize() { return ACL_SUCCESS; }

NPUSIM_EXPORT aclError aclrtGetDeviceCount(uint32_t* count) {
    *count = static_cast<uint32_t>(device_count());
    return *count > 0 ? ACL_SUCCESS : fail(ACL_ERROR_RT_NO_DEVICE, "no device is visible; see ASCEND_RT_VISIBLE_DEVICES");
}

NPUSIM_EXPORT aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= device_count())
        return fail(ACL_ERROR_RT_INVALID_DEVICEID,
                    "device " + std::to_string(device) + " is not among the " + std::to_string(device_count()) + " visible");
    current = device;
    contexts()[device].active = true;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtGetDevice(int32_t* device) {
    if (current < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "no device is set in this thread");
    *device = current;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtResetDevice(int32_t device) {
    if (device < 0 || device >= device_count()) return fail(ACL_ERROR_RT_INVALID_DEVICEID, "no such device");
    end_streams(device);
    contexts()[device].error = ACL_SUCCESS;
    contexts()[device].active = false;
    if (current == device) current = -1;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtGetCurrentContext(aclrtContext* context) {
    if (current < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "no device is set in this thread");
    *context = &contexts()[current];
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtSetCurrentContext(aclrtContext context) {
    current = static_cast<int>(&checked<Context>(context, __func__) - contexts());
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
    if (flags != nullptr) *flags = 0;
    *active = contexts()[device].active ? 1 : 0;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logic) {
    *logic = user;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid* uuid) {
    std::memset(uuid, 0, sizeof *uuid);
    std::snprintf(uuid->bytes, sizeof uuid->bytes, "npusim-%d", physical_device(device));
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
    *can = device != peer ? 1 : 0;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }

NPUSIM_EXPORT aclError aclrtDeviceGetBareTgid(int32_t* pid) {
    *pid = getpid();
    return ACL_SUCCESS;
}

// --- what the device and CANN are -----------------------------------------------------------------------------------

namespace {
constexpr int64_t kCubeCores = 24;  // those of an Ascend 910B2
constexpr int64_t kVectorCores = 48;
constexpr int64_t kL2Bytes = 192 << 20;
constexpr const char* kCannVersion = "9.0.0";
constexpr const char* kDriverVersion = "25.5.0";
constexpr aclCannAttr kAttributes[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16};
}  // namespace

NPUSIM_EXPORT const char* aclrtGetSocName() { return "Ascend910B2"; }
NPUSIM_EXPORT const char* aclGetRecentErrMsg() { return recent_error.c_str(); }

NPUSIM_EXPORT aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t* value) {
    switch (attribute) {
        case ACL_DEV_ATTR_AICORE_CORE_NUM:
        case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = kCubeCores; return ACL_SUCCESS;
        case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = kVectorCores; return ACL_SUCCESS;
        case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = static_cast<int64_t>(config().memory); return ACL_SUCCESS;
        case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = kL2Bytes; return ACL_SUCCESS;
        default: return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtGetDeviceInfo: attribute " + std::to_string(attribute));
    }
}

NPUSIM_EXPORT aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
    *value = info == ACL_DEVICE_INFO_AI_CORE_NUM ? kCubeCores : info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? kVectorCores : kL2Bytes;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclGetCannAttributeList(const aclCannAttr** list, size_t* count) {
    *list = kAttributes;
    *count = std::size(kAttributes);
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclGetCannAttribute(aclCannAttr attribute, int32_t* value) {
    *value = std::count(std::begin(kAttributes), std::end(kAttributes), attribute) > 0;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion* version) {
    std::memset(version, 0, sizeof *version);
    std::strcpy(version->version, name == ACL_PKG_NAME_DRIVER ? kDriverVersion : kCannVersion);
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclsysGetVersionStr(char*, char* version) {
    std::strcpy(version, kCannVersion);
    return ACL_SUCCESS;
}

// torch_npu takes the path of aclnn operators only where just-in-time compilation is off, whatever it was set to.
NPUSIM_EXPORT size_t aclGetCompileoptSize(aclCompileOpt) { return sizeof "disable"; }
NPUSIM_EXPORT aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
    std::snprintf(value, length, "disable");
    return ACL_SUCCESS;
}

namespace {
uint32_t cores(aclrtDevResLimitType type) {
    return static_cast<uint32_t>(type == ACL_RT_DEV_RES_CUBE_CORE ? kCubeCores : kVectorCores);
}
}  // namespace

NPUSIM_EXPORT aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t* value) {
    *value = cores(type);
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType type, uint32_t* value) {
    *value = cores(type);
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
    *value = cores(type);
    return ACL_SUCCESS;
}

namespace {
std::atomic<int64_t> system_parameters[ACL_OPT_STRONG_CONSISTENCY + 1];
}  // namespace

NPUSIM_EXPORT aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    system_parameters[option] = value;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

NPUSIM_EXPORT aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
    *value = system_parameters[option];
    return ACL_SUCCESS;
}

// --- settings without an effect here ---------------------------------------------------------------------------------

#define NPUSIM_IGNORED(name, ...) \
    NPUSIM_EXPORT aclError name(__VA_ARGS__) { return ACL_SUCCESS; }

NPUSIM_IGNORED(aclSetCompileopt, aclCompileOpt, const char*)
NPUSIM_IGNORED(aclmdlInitDump)
NPUSIM_IGNORED(aclmdlSetDump, const char*)
NPUSIM_IGNORED(aclmdlFinalizeDump)
NPUSIM_IGNORED(aclrtSetDeviceSatMode, aclrtFloatOverflowMode)
NPUSIM_IGNORED(aclrtSetStreamOverflowSwitch, aclrtStream, uint32_t)
NPUSIM_IGNORED(aclrtSetStreamFailureMode, aclrtStream, uint64_t)
NPUSIM_IGNORED(aclrtSetStreamAttribute, aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*)
NPUSIM_IGNORED(aclrtSetOpWaitTimeout, uint32_t)
NPUSIM_IGNORED(aclrtSetOpExecuteTimeOut, uint32_t)
NPUSIM_IGNORED(aclrtUseStreamResInCurrentThread, aclrtStream)
NPUSIM_IGNORED(aclrtUnuseStreamResInCurrentThread, aclrtStream)

NPUSIM_EXPORT void aclAppLog(aclLogLevel level, const char* function, const char* file, uint32_t line, const char*, ...) {
    if (level >= ACL_ERROR) trace("torch_npu logs an error in %s (%s:%u)", function, file, line);
}

// CANN's own log: no level is on.
NPUSIM_EXPORT int32_t CheckLogLevel(int32_t, int32_t) { return 0; }
NPUSIM_EXPORT void DlogRecord(int32_t, int32_t, const char*, ...) {}

// The profiler's hooks, called whether or not a profiler runs.
NPUSIM_EXPORT int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
NPUSIM_EXPORT int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
NPUSIM_EXPORT int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
NPUSIM_EXPORT int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
NPUSIM_EXPORT uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
NPUSIM_EXPORT uint64_t MsprofSysCycleTime() { return 0; }

// Operators compiled at run time, torch_npu's way where it finds no aclnn operator: their description may be built,
// so that the call that would run it can name the operator. One is simulated: with AsStrided torch_npu copies a slice from
// one device to another.
NPUSIM_EXPORT aclopAttr* aclopCreateAttr() { return new aclopAttr; }
NPUSIM_EXPORT void aclopDestroyAttr(const aclopAttr* attributes) { delete attributes; }
namespace {
size_t item_size(aclDataType type) {
    switch (type) {
        case ACL_DOUBLE: case ACL_INT64: case ACL_UINT64: case ACL_COMPLEX64: return 8;
        case ACL_FLOAT: case ACL_INT32: case ACL_UINT32: return 4;
        case ACL_FLOAT16: case ACL_BF16: case ACL_INT16: case ACL_UINT16: return 2;
        case ACL_INT8: case ACL_UINT8: case ACL_BOOL: return 1;
        default: return 0;
    }
}
}  // namespace

NPUSIM_EXPORT aclTensorDesc* aclCreateTensorDesc(aclDataType type, int dims, const int64_t* shape, aclFormat) {
    return new aclTensorDesc{item_size(type), std::accumulate(shape, shape + dims, int64_t{1}, std::multiplies<>())};
}
NPUSIM_EXPORT void aclDestroyTensorDesc(const aclTensorDesc* description) { delete description; }
NPUSIM_EXPORT aclDataBuffer* aclCreateDataBuffer(void* data, size_t) { return new aclDataBuffer{data}; }
NPUSIM_EXPORT aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
    delete buffer;
    return ACL_SUCCESS;
}
NPUSIM_EXPORT void aclSetTensorDescName(aclTensorDesc*, const char*) {}
NPUSIM_IGNORED(aclSetTensorFormat, aclTensorDesc*, aclFormat)
NPUSIM_IGNORED(aclSetTensorPlaceMent, aclTensorDesc*, aclMemType)
NPUSIM_IGNORED(aclSetTensorShape, aclTensorDesc*, int, const int64_t*)
NPUSIM_IGNORED(aclopSetAttrBool, aclopAttr*, const char*, uint8_t)
NPUSIM_IGNORED(aclopSetAttrDataType, aclopAttr*, const char*, aclDataType)
NPUSIM_IGNORED(aclopSetAttrFloat, aclopAttr*, const char*, float)
NPUSIM_IGNORED(aclopSetAttrInt, aclopAttr*, const char*, int64_t)
NPUSIM_IGNORED(aclopSetAttrListBool, aclopAttr*, const char*, int, const uint8_t*)
NPUSIM_IGNORED(aclopSetAttrListFloat, aclopAttr*, const char*, int, const float*)
NPUSIM_IGNORED(aclopSetAttrListInt, aclopAttr*, const char*, int, const int64_t*)
NPUSIM_IGNORED(aclopSetAttrListListInt, aclopAttr*, const char*, int, const int*, const int64_t* const[])
NPUSIM_IGNORED(aclopSetAttrString, aclopAttr*, const char*, const char*)


namespace {
/// Copies the elements of `from` at `offset` and these strides, row after row, to `to`; returns what is behind the last.
char* copy_strided(char* to, const char* from, const int64_t* shape, const int64_t* strides, size_t dims, size_t item_size) {
    if (dims == 0) return static_cast<char*>(std::memcpy(to, from, item_size)) + item_size;
    for (int64_t i = 0; i < shape[0]; ++i)
        to = copy_strided(to, from + i * strides[0] * static_cast<int64_t>(item_size), shape + 1, strides + 1, dims - 1, item_size);
    return to;
}

/// Inputs: the tensor, and as int64 its new shape, strides and offset.
aclError execute(const char* type, const aclTensorDesc* const described[], const aclDataBuffer* const inputs[], const aclDataBuffer* const outputs[],
                 aclrtStream stream) {
    if (std::string(type) != "AsStrided") unsimulated((std::string("the operator ") + type + ", which has no aclnn here,").c_str());
    if (described[0]->item_size == 0) unsimulated("AsStrided of this type");
    const auto list = [&](int input) {  // in host memory that is freed after the call
        const auto* first = static_cast<const int64_t*>(inputs[input]->data);
        return std::vector<int64_t>(first, first + described[input]->elements);
    };
    enqueue(stream, [item_size = described[0]->item_size, from = static_cast<const char*>(inputs[0]->data), shape = list(1), strides = list(2),
                     offset = list(3), to = static_cast<char*>(outputs[0]->data)] {
        copy_strided(to, from + offset.at(0) * static_cast<int64_t>(item_size), shape.data(), strides.data(), shape.size(), item_size);
    }, "AsStrided");
    return ACL_SUCCESS;
}
}  // namespace

NPUSIM_EXPORT aclError aclopCompileAndExecute(const char* type, int, const aclTensorDesc* const described[], const aclDataBuffer* const inputs[],
                                              int, const aclTensorDesc* const[], aclDataBuffer* const outputs[], const aclopAttr*, aclopEngineType,
                                              aclopCompileType, const char*, aclrtStream stream) {
    return execute(type, described, inputs, outputs, stream);
}
NPUSIM_EXPORT aclError aclopCompileAndExecuteV2(const char* type, int, aclTensorDesc* described[], aclDataBuffer* inputs[], int, aclTensorDesc*[],
                                                aclDataBuffer* outputs[], aclopAttr*, aclopEngineType, aclopCompileType, const char*,
                                                aclrtStream stream) {
    return execute(type, described, inputs, outputs, stream);
}

// --- what is not simulated -------------------------------------------------------------------------------------------

// Symbols that the wheel needs to be loaded at all. Their parameters do not matter: none of them returns.
#define NPUSIM_UNSIMULATED(name) \
    NPUSIM_EXPORT __attribute__((noreturn)) void npusim_##name() __asm__(#name); \
    void npusim_##name() { unsimulated(#name); }

// Reading back such a description; device code.
NPUSIM_UNSIMULATED(aclGetTensorDescDimV2)
NPUSIM_UNSIMULATED(aclGetTensorDescFormat)
NPUSIM_UNSIMULATED(aclGetTensorDescNumDims)
NPUSIM_UNSIMULATED(aclGetTensorDescType)
NPUSIM_UNSIMULATED(aclrtBinaryGetFunction)
NPUSIM_UNSIMULATED(aclrtBinaryLoadFromData)
NPUSIM_UNSIMULATED(aclrtGetFunctionAddr)
NPUSIM_UNSIMULATED(rtDevBinaryRegister)
NPUSIM_UNSIMULATED(rtFunctionRegister)
NPUSIM_UNSIMULATED(rtGetC2cCtrlAddr)
NPUSIM_UNSIMULATED(rtKernelLaunch)
// Callbacks that a thread of the application polls for (aclrtLaunchHostFunc's, which run by themselves, are simulated).
NPUSIM_UNSIMULATED(aclrtProcessReport)
// A context of its own; copies of blocks of an attention cache to the host.
NPUSIM_UNSIMULATED(aclrtCreateContext)
NPUSIM_UNSIMULATED(aclrtMemcpyBatchAsync)
