// What the files of libascendcl.so share beyond sim.h.
#pragma once

#include "sim.h"

#include <memory>

namespace npusim {

/// The device that this thread has set, or -1: nothing is set until aclrtSetDevice.
int current_device();
int device_count();

/// An error of any stream is the whole device's, sticky until aclrtResetDevice: also a stream that merely waited
/// for the failed one must not go on as if it had the data.
void fail_device(int device, aclError code, const std::string& text);
bool device_failed(int device);
/// The device's error with its text kept for aclGetRecentErrMsg, or success.
aclError device_error(int device);

/// Puts a task on a stream that runs even after the device failed: what others wait for (events, host callbacks).
void enqueue_always(aclrtStream stream, std::function<void()> task);
aclError synchronize(aclrtStream stream, int timeout_ms = -1);
void end_streams(int device);

/// Bytes of a device's memory in use by all living processes of the node.
uint64_t device_memory_used(int device);

}  // namespace npusim
