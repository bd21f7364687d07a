// Streams: a first-in first-out queue and a worker thread each. Events: the last of their records.
#include "runtime.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace npusim {
namespace {

using Clock = std::chrono::steady_clock;

struct Task {
    std::function<void()> run;
    std::string name;
    bool always;
    bool instant = false;  // runs under the queue's lock: whoever sees its effect sees the task finished
};

/// What a stream's worker thread works off. It outlives the handle: a destroyed stream finishes what it was given.
struct Queue {
    explicit Queue(int device) : device(device) {}
    const int device;
    std::mutex mutex;  // guards what follows
    std::condition_variable changed;
    std::deque<Task> tasks;
    uint64_t submitted = 0;
    uint64_t finished = 0;
    bool closed = false;
};

void execute(Queue& queue, const Task& task) {
    if (device_failed(queue.device) && !task.always) return;
    const std::string name = task.name.empty() ? "" : task.name + ": ";
    try {
        task.run();
    } catch (const Dropped&) {
    } catch (const DeviceError& error) {
        fail_device(queue.device, error.code, name + error.what());
    } catch (const std::exception& error) {
        fail_device(queue.device, ACL_ERROR_RT_AICORE_EXCEPTION, name + error.what());
    }
}

void work(const std::shared_ptr<Queue>& queue) {
    aclrtSetDevice(queue->device);  // host callbacks run here and may ask for the device
    std::unique_lock<std::mutex> lock(queue->mutex);
    for (;;) {
        queue->changed.wait(lock, [&] { return !queue->tasks.empty() || queue->closed; });
        if (queue->tasks.empty()) return;
        {
            const Task task = std::move(queue->tasks.front());
            queue->tasks.pop_front();
            if (!task.instant) lock.unlock();
            execute(*queue, task);
        }
        if (!lock.owns_lock()) lock.lock();
        ++queue->finished;
        queue->changed.notify_all();
    }
}

struct Stream : Tagged {
    static constexpr const char* kind = "stream";
    explicit Stream(int device) : Tagged(kind), id(next_id++), queue(std::make_shared<Queue>(device)) {
        std::thread(work, queue).detach();
    }
    static std::atomic<int> next_id;
    const int id;
    const std::shared_ptr<Queue> queue;
};
std::atomic<int> Stream::next_id{1};

/// All streams, for those who wait for a whole device.
struct Registry {
    std::mutex mutex;
    std::vector<Stream*> streams;
    Stream* defaults[kMaxDevices] = {};
};

Registry& registry() {
    static auto* registry = new Registry;
    return *registry;
}

Stream* create_stream(int device) {
    auto* stream = new Stream(device);
    registry().streams.push_back(stream);
    return stream;
}

Stream& stream_of(aclrtStream handle, const char* call) {
    if (handle != nullptr) return checked<Stream>(handle, call);
    if (current_device() < 0) misuse(std::string(call) + " wants the default stream and no device is set in this thread");
    std::lock_guard<std::mutex> guard(registry().mutex);
    Stream*& stream = registry().defaults[current_device()];
    if (stream == nullptr) stream = create_stream(current_device());
    return *stream;
}

void submit(Queue& queue, Task task) {
    std::lock_guard<std::mutex> guard(queue.mutex);
    queue.tasks.push_back(std::move(task));
    ++queue.submitted;
    queue.changed.notify_all();
}

/// Waits for what was submitted before this call. False: the time ran out.
bool drain(Queue& queue, int timeout_ms) {
    std::unique_lock<std::mutex> lock(queue.mutex);
    const uint64_t target = queue.submitted;
    const auto done = [&] { return queue.finished >= target; };
    if (timeout_ms >= 0) return queue.changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), done);
    queue.changed.wait(lock, done);
    return true;
}

void close(Queue& queue, bool drop) {
    std::lock_guard<std::mutex> guard(queue.mutex);
    if (drop) {
        queue.submitted -= queue.tasks.size();
        queue.tasks.clear();
    }
    queue.closed = true;
    queue.changed.notify_all();
}

/// Counts the calls of the operator that NPUSIM_FAULT_OP names; true at the one that is to fail.
bool fault_is_due(const char* name) {
    static std::atomic<uint64_t> calls{0};
    return name != nullptr && config().op_fails == name && ++calls == config().op_fails_at;
}

/// One record of an event. Shared with the tasks that wait for it, as the event may be recorded anew on any stream meanwhile, or destroyed.
struct Record {
    std::mutex mutex;  // guards what follows
    std::condition_variable changed;
    bool done = false;
    Clock::time_point time;

    void finish() {
        std::lock_guard<std::mutex> guard(mutex);
        done = true;
        time = Clock::now();
        changed.notify_all();
    }
    void await() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return done; });
    }
    /// When it was reached, or nothing.
    std::optional<Clock::time_point> reached() {
        std::lock_guard<std::mutex> guard(mutex);
        return done ? std::optional(time) : std::nullopt;
    }
};

class Event : public Tagged {
public:
    static constexpr const char* kind = "event";
    Event() : Tagged(kind) {}

    std::shared_ptr<Record> record() {
        std::lock_guard<std::mutex> guard(mutex_);
        return last_ = std::make_shared<Record>();
    }
    /// The last record, or null.
    std::shared_ptr<Record> last() {
        std::lock_guard<std::mutex> guard(mutex_);
        return last_;
    }

private:
    std::mutex mutex_;  // guards what follows
    std::shared_ptr<Record> last_;
};

std::optional<Clock::time_point> time_of(aclrtEvent handle, const char* call) {
    const auto record = checked<Event>(handle, call).last();
    return record != nullptr ? record->reached() : std::nullopt;
}

}  // namespace

void enqueue(aclrtStream handle, std::function<void()> task, const char* name) {
    Stream& stream = stream_of(handle, __func__);
    if (name != nullptr) trace("stream %d: %s", stream.id, name);
    if (fault_is_due(name)) task = [] { throw std::runtime_error("failed on request (NPUSIM_FAULT_OP)"); };
    submit(*stream.queue, {std::move(task), name != nullptr ? name : "", false});
}

void enqueue_always(aclrtStream handle, std::function<void()> task) {
    submit(*stream_of(handle, __func__).queue, {std::move(task), "", true});
}

aclError synchronize(aclrtStream handle, int timeout_ms) {
    Queue& queue = *stream_of(handle, __func__).queue;
    if (!drain(queue, timeout_ms)) return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "the stream is not done in time");
    return device_error(queue.device);
}

void end_streams(int device) {
    std::lock_guard<std::mutex> guard(registry().mutex);
    for (Stream* stream : registry().streams) {
        if (stream->queue->device != device) continue;
        std::lock_guard<std::mutex> queue_guard(stream->queue->mutex);
        stream->queue->submitted -= stream->queue->tasks.size();
        stream->queue->tasks.clear();
        stream->queue->changed.notify_all();
    }
}

}  // namespace npusim

using namespace npusim;

// --- streams ---------------------------------------------------------------------------------------------------------

NPUSIM_EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
    if (current_device() < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "no device is set in this thread");
    std::lock_guard<std::mutex> guard(registry().mutex);
    *stream = create_stream(current_device());
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

namespace {
aclError destroy_stream(aclrtStream handle, const char* call, bool drop) {
    Stream& stream = checked<Stream>(handle, call);
    close(*stream.queue, drop);
    std::lock_guard<std::mutex> guard(registry().mutex);
    auto& streams = registry().streams;
    streams.erase(std::find(streams.begin(), streams.end(), &stream));
    delete &stream;
    return ACL_SUCCESS;
}
}  // namespace

NPUSIM_EXPORT aclError aclrtDestroyStream(aclrtStream stream) { return destroy_stream(stream, __func__, false); }
NPUSIM_EXPORT aclError aclrtDestroyStreamForce(aclrtStream stream) { return destroy_stream(stream, __func__, true); }
NPUSIM_EXPORT aclError aclrtSynchronizeStream(aclrtStream stream) { return synchronize(stream); }

NPUSIM_EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout_ms) {
    return synchronize(stream, timeout_ms);
}

NPUSIM_EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
    const int device = current_device();
    if (device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "no device is set in this thread");
    std::vector<std::shared_ptr<Queue>> queues;
    {
        std::lock_guard<std::mutex> guard(registry().mutex);
        for (Stream* stream : registry().streams)
            if (stream->queue->device == device) queues.push_back(stream->queue);
    }
    for (const auto& queue : queues)
        if (!drain(*queue, timeout_ms)) return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "a stream is not done in time");
    return device_error(device);
}

NPUSIM_EXPORT aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

NPUSIM_EXPORT aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
    Queue& queue = *stream_of(handle, __func__).queue;
    std::lock_guard<std::mutex> guard(queue.mutex);
    *status = queue.finished >= queue.submitted ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    return device_error(queue.device);
}

NPUSIM_EXPORT aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
    *id = stream_of(stream, __func__).id;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* args) {
    enqueue_always(stream, [function, args] { function(args); });
    return ACL_SUCCESS;
}

// --- events ----------------------------------------------------------------------------------------------------------

NPUSIM_EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
    if ((flag & ACL_EVENT_IPC) != 0) return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "events between processes are not simulated");
    *event = new Event;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }

NPUSIM_EXPORT aclError aclrtDestroyEvent(aclrtEvent event) {
    delete &checked<Event>(event, __func__);
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    const auto record = checked<Event>(event, __func__).record();
    submit(*stream_of(stream, __func__).queue, {[record] { record->finish(); }, "", true, true});
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    const auto record = checked<Event>(event, __func__).last();
    if (record != nullptr) enqueue_always(stream, [record] { record->await(); });
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtSynchronizeEvent(aclrtEvent event) {
    const auto record = checked<Event>(event, __func__).last();
    if (record != nullptr) record->await();
    return current_device() < 0 ? ACL_SUCCESS : device_error(current_device());
}

NPUSIM_EXPORT aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
    const auto record = checked<Event>(event, __func__).last();
    if (current_device() >= 0 && device_failed(current_device())) return device_error(current_device());
    *status = record == nullptr || record->reached() ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

// Each wait is for one record, so nothing remains of it that would have to be queried or reset.
NPUSIM_EXPORT aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
    checked<Event>(event, __func__);
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtResetEvent(aclrtEvent event, aclrtStream) {
    checked<Event>(event, __func__);
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
    const auto from = time_of(start, __func__), to = time_of(end, __func__);
    if (!from || !to) return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "an event was not recorded, or is not reached yet");
    *ms = std::chrono::duration<float, std::milli>(*to - *from).count();
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
    const auto time = time_of(event, __func__);
    if (!time) return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the event was not recorded, or is not reached yet");
    *microseconds = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time->time_since_epoch()).count());
    return ACL_SUCCESS;
}
