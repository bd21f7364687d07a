// What the libraries of the simulated CANN share. libascendcl.so (runtime and HCCL) defines it, libopapi.so uses it.
//
// Threads are never joined and globals never destroyed: a device outlives the process that used it, and torch_npu
// calls into the runtime from threads of its own until the very end of the process.
#pragma once

#include <acl/acl.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

#define NPUSIM_EXPORT extern "C" __attribute__((visibility("default")))

namespace npusim {

/// The exit status of a process that met something that is not simulated.
constexpr int kUnsimulatedStatus = 86;
constexpr int kMaxDevices = 16;

/// The knobs: README.md says what each does. Read from the environment once, at the first call.
struct Config {
    int devices;               // NPUSIM_DEVICES
    uint64_t memory;           // NPUSIM_MEMORY: bytes per device
    std::string node;          // NPUSIM_NODE: processes with the same one share the devices' memory
    int log;                   // NPUSIM_LOG: 2 traces each call
    double hccl_timeout_s;     // NPUSIM_HCCL_TIMEOUT, otherwise HCCL_EXEC_TIMEOUT
    bool hccl_mild;            // NPUSIM_HCCL_MILD
    uint64_t oom_after;        // NPUSIM_FAULT_OOM_AFTER: bytes; 0 is never, as in the next
    uint64_t oom_at;           // NPUSIM_FAULT_OOM_AT: the nth allocation
    int exit_rank;             // NPUSIM_FAULT_EXIT=RANK:N
    uint64_t exit_at;          //
    std::string op_fails;      // NPUSIM_FAULT_OP=NAME:N
    uint64_t op_fails_at;      //
};
const Config& config();

/// What a task throws that ends without its effect and without failing the device.
struct Dropped {};

/// What a task throws to fail with a code of its own; any other exception fails it as an AICore exception (507015).
class DeviceError : public std::runtime_error {
public:
    DeviceError(aclError code, const std::string& text) : std::runtime_error(text), code(code) {}
    const aclError code;
};

/// Prints "npusim: WHAT is not simulated" and ends the process with kUnsimulatedStatus. Returning an error instead would
/// let torch_npu go on: it drops the rest of its queue silently and yields wrong numbers.
[[noreturn]] void unsimulated(const char* what);

/// Prints "npusim: " and the text, and ends the process: the application broke the interface (a wrong handle, say).
[[noreturn]] void misuse(const std::string& text);

/// Keeps the text for aclGetRecentErrMsg in this thread and returns the code: `return fail(ACL_ERROR_X, "...")`.
aclError fail(aclError code, const std::string& text);

/// Prints a line on stderr when NPUSIM_LOG is 2 or more.
__attribute__((format(printf, 1, 2))) void trace(const char* format, ...);

/// Runs the task on the stream's worker thread, after all that was put there before. A null stream is the current
/// device's default stream. A throwing task leaves the stream failed until its device is reset; later tasks are then
/// dropped, as a device does. `name` is an operator's: it is traced, counted for NPUSIM_FAULT_OP and put before the error's text.
void enqueue(aclrtStream stream, std::function<void()> task, const char* name = nullptr);

/// First base of every object behind an opaque handle: says what the object is, so that a wrong or stale handle is told
/// from a good one. `struct aclTensor : npusim::Tagged { static constexpr const char* kind = "aclTensor"; ... }`
class Tagged {
public:
    explicit Tagged(const char* kind) : magic_(kAlive), kind_(kind) {}
    ~Tagged() { magic_ = kDead; }
    Tagged(const Tagged&) = delete;
    Tagged& operator=(const Tagged&) = delete;

    /// What the handle is in truth: its kind, or a phrase for null, destroyed and foreign ones.
    static const char* describe(const void* handle) {
        if (handle == nullptr) return "null";
        const auto address = reinterpret_cast<uintptr_t>(handle);
        if (address < 4096 || address % alignof(Tagged) != 0) return "no handle";  // a number, where a handle is wanted
        const auto* tagged = static_cast<const Tagged*>(handle);
        if (tagged->magic_ == kDead) return "a destroyed handle";
        return tagged->magic_ == kAlive ? tagged->kind_ : "no handle";
    }

private:
    static constexpr uint64_t kAlive = 0x6e70757369'6d2b01;
    static constexpr uint64_t kDead = 0x6e70757369'6d2d00;
    volatile uint64_t magic_;  // volatile: or the compiler drops the store in the destructor
    const char* kind_;
};

/// The object behind a handle; `call` is the caller's __func__. A wrong handle stops the process: with the untyped
/// interface of aclnn, what follows would be a crash far from its cause.
template <class T>
T& checked(const void* handle, const char* call) {
    const char* kind = Tagged::describe(handle);
    if (std::strcmp(kind, T::kind) != 0) misuse(std::string(call) + " wants a handle of kind " + T::kind + " and got " + kind);
    return *static_cast<T*>(const_cast<void*>(handle));
}

}  // namespace npusim
