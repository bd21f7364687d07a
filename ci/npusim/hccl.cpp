// HCCL: collectives and point-to-point transfers between processes of one host.
//
// A group's ranks share one sparse memory file: first the control block, then a region per rank for what it brings to a
// collective and a region per ordered pair for what one sends to the other. The file has no name, so that nothing
// remains of it whoever dies and when; ranks find it as a descriptor of the process that made the root info. Each rank
// locks a byte of the file, which tells the others whether it lives.
#include "runtime.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <hccl/hccl.h>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <mutex>
#include <vector>

namespace npusim {
namespace {

constexpr int kMaxRanks = 64;
constexpr uint64_t kRegion = uint64_t{1} << 40;  // bytes of a region; addresses, not memory
constexpr uint64_t kPiece = kRegion / kMaxRanks;  // of a region that holds something for each rank
constexpr uint64_t kKeep = 1 << 20;               // a region's pages up to here are kept for the next message
constexpr auto kPulse = std::chrono::milliseconds(100);  // how often a waiting rank looks whether its peers live

using Clock = std::chrono::steady_clock;

/// What one rank asks for; the same on all ranks, or the program is wrong.
struct Call {
    char name[16];
    int type, op, root;
    uint64_t count;  // 0 where it may differ between ranks
    bool operator==(const Call& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};

Call make_call(const char* name, HcclDataType type, uint64_t count, int op = -1, int root = -1) {
    Call call;
    std::memset(&call, 0, sizeof call);  // with the padding, which is compared too
    std::strncpy(call.name, name, sizeof call.name - 1);
    call.type = type;
    call.op = op;
    call.root = root;
    call.count = count;
    return call;
}

std::string describe(const Call& call) {
    return std::string(call.name) + "(count " + std::to_string(call.count) + ", type " + std::to_string(call.type) + ", op " +
           std::to_string(call.op) + ", root " + std::to_string(call.root) + ")";
}

struct RankState {
    std::atomic<bool> joined;
    std::atomic<uint64_t> posted;    // collectives for which this rank's part lies in its region
    std::atomic<uint64_t> finished;  // collectives for which it has read the others'
    Call call;                       // of the last posted
};

struct Channel {
    std::atomic<uint64_t> sent, received;  // messages
    uint64_t bytes;                        // of the last sent
};

struct Control {
    std::atomic<uint32_t> bell;  // changes whenever anything else does
    RankState ranks[kMaxRanks];
    Channel channels[kMaxRanks][kMaxRanks];  // [from][to]
};
constexpr uint64_t kControlBytes = (sizeof(Control) + 4095) / 4096 * 4096;

int futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
    return static_cast<int>(syscall(SYS_futex, word, operation, value, timeout, nullptr, 0));
}

[[noreturn]] void io_failed(const char* what) {
    throw DeviceError(ACL_ERROR_RT_AICORE_EXCEPTION, std::string("HCCL: ") + what + ": " + std::strerror(errno));
}

/// One rank's side of a group. Tasks on streams share it, so it lives until the last of them has ended.
class Group {
public:
    Group(int fd, int rank, int size, std::string name, double timeout_s)
        : rank(rank), size(size), name(std::move(name)), fd_(fd), timeout_s_(timeout_s) {
        void* map = mmap(nullptr, kControlBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED) io_failed("map the control block");
        control_ = static_cast<Control*>(map);
    }

    ~Group() {
        munmap(control_, kControlBytes);
        close(fd_);  // and with it the lock: from here on the others see this rank as gone
    }

    /// Returns once all ranks are there.
    void join() {
        struct flock lock = byte_of(rank);
        if (fcntl(fd_, F_SETLK, &lock) != 0) throw std::runtime_error("HCCL: rank " + std::to_string(rank) + " is there twice");
        control_->ranks[rank].joined = true;
        ring();
        await("join", [this](int peer) { return control_->ranks[peer].joined.load(); });
    }

    /// Ends what this process waits for in the group, and all later calls.
    void abort() {
        aborted_ = true;
        ring();
    }

    /// Runs a collective: `bring` writes this rank's part with put(), `take` reads the others' with get().
    void collect(const Call& call, const std::function<void()>& bring, const std::function<void()>& take) {
        std::lock_guard<std::mutex> guard(mutex_);
        die_if_told();
        const uint64_t number = ++number_;
        RankState& mine = control_->ranks[rank];
        highest_ = 0;
        bring();
        mine.call = call;
        mine.posted = number;
        ring();
        await(call.name, [this, number](int peer) { return control_->ranks[peer].posted >= number; });
        for (int peer = 0; peer < size; ++peer)
            if (!(control_->ranks[peer].call == call)) mismatch(call, peer);
        take();
        mine.finished = number;
        ring();
        await(call.name, [this, number](int peer) { return control_->ranks[peer].finished >= number; });
        shrink(rank, highest_);
    }

    void put(uint64_t offset, const void* data, uint64_t bytes) {
        write(region(rank) + offset, data, bytes);
        highest_ = std::max(highest_, offset + bytes);
    }
    void get(int peer, uint64_t offset, void* data, uint64_t bytes) const { read(region(peer) + offset, data, bytes); }

    struct Transfer {
        bool send;
        int peer;
        void* data;
        uint64_t bytes;
        bool posted = false, done = false;
    };

    /// Makes all transfers: in order for each peer and direction, and otherwise in whatever order they can go.
    void transfer(std::vector<Transfer> transfers) {
        std::lock_guard<std::mutex> guard(mutex_);
        die_if_told();
        await("send/recv", [&](int peer) { return advance(transfers, peer); });
    }

    const int rank, size;
    const std::string name;

private:
    /// Moves the transfers with one peer on as far as it lets them; true when all are done.
    bool advance(std::vector<Transfer>& transfers, int peer) {
        bool blocked[2] = {false, false};  // receives, sends
        for (Transfer& item : transfers) {
            if (item.peer != peer || item.done || blocked[item.send]) continue;
            while (!item.done && step(item)) {
            }
            blocked[item.send] = !item.done;
        }
        return !blocked[0] && !blocked[1];
    }

    /// Moves the transfer on if the other side allows it; true if it did.
    bool step(Transfer& item) {
        Channel& channel = item.send ? control_->channels[rank][item.peer] : control_->channels[item.peer][rank];
        const int index = item.send ? pair(rank, item.peer) : pair(item.peer, rank);
        if (item.send && !item.posted) {
            if (channel.sent != channel.received) return false;
            write(region(index), item.data, item.bytes);
            channel.bytes = item.bytes;
            ++channel.sent;
            item.posted = true;
        } else if (item.send) {
            if (channel.sent != channel.received) return false;
            shrink(index, item.bytes);
            item.done = true;
        } else {
            if (channel.sent == channel.received) return false;
            if (channel.bytes != item.bytes)
                throw DeviceError(ACL_ERROR_RT_PARAM_INVALID, who("recv") + ": rank " + std::to_string(item.peer) + " sends " +
                                                                  std::to_string(channel.bytes) + " bytes, expected were " +
                                                                  std::to_string(item.bytes));
            read(region(index), item.data, item.bytes);
            ++channel.received;
            item.done = true;
        }
        ring();
        return true;
    }

    /// Returns when all ranks are ready. Throws when a rank that is not has gone, when the group is aborted, or when the time is up.
    template <class Ready>
    void await(const char* what, const Ready& ready) {
        const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s_);
        for (bool look = false;; look = true) {
            const uint32_t bell = control_->bell;
            int missing = -1;
            for (int peer = 0; peer < size; ++peer) {
                if (ready(peer)) continue;
                missing = peer;
                // In this order: a rank that has done its part may leave.
                if (!config().hccl_mild && look && gone(peer) && !ready(peer))
                    throw DeviceError(ACL_ERROR_RT_AICORE_EXCEPTION, who(what) + ": rank " + std::to_string(peer) + " is gone");
            }
            if (missing < 0) return;
            if (aborted_ && config().hccl_mild) throw Dropped{};
            if (aborted_) throw DeviceError(ACL_ERROR_RT_AICORE_EXCEPTION, who(what) + ": aborted");
            if (Clock::now() > deadline)
                throw DeviceError(ACL_ERROR_RT_FFTS_PLUS_TIMEOUT, who(what) + ": timed out after " + std::to_string(timeout_s_) +
                                                                      " s waiting for rank " + std::to_string(missing));
            const timespec pulse = {0, std::chrono::nanoseconds(kPulse).count()};
            futex(&control_->bell, FUTEX_WAIT, bell, &pulse);
        }
    }

    void ring() {
        ++control_->bell;
        futex(&control_->bell, FUTEX_WAKE, INT32_MAX, nullptr);
    }

    bool gone(int peer) const {
        if (peer == rank || !control_->ranks[peer].joined) return false;
        struct flock lock = byte_of(peer);
        return fcntl(fd_, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
    }

    static struct flock byte_of(int rank) {
        struct flock lock = {};
        lock.l_type = F_WRLCK;
        lock.l_whence = SEEK_SET;
        lock.l_start = rank;
        lock.l_len = 1;
        return lock;
    }

    void mismatch(const Call& call, int peer) const {
        throw DeviceError(ACL_ERROR_RT_PARAM_INVALID, who(call.name) + ": this rank calls " + describe(call) + ", rank " +
                                                          std::to_string(peer) + " " + describe(control_->ranks[peer].call));
    }

    std::string who(const char* what) const {
        return std::string("HCCL ") + what + " in group " + name + " (rank " + std::to_string(rank) + " of " + std::to_string(size) + ")";
    }

    void die_if_told() const {
        static std::atomic<uint64_t> calls{0};
        if (rank == config().exit_rank && ++calls == config().exit_at) std::raise(SIGKILL);
    }

    int pair(int from, int to) const { return size + from * size + to; }
    static uint64_t region(int index) { return kControlBytes + static_cast<uint64_t>(index) * kRegion; }

    void write(uint64_t offset, const void* data, uint64_t bytes) const {
        for (auto* from = static_cast<const char*>(data); bytes > 0;) {
            const ssize_t n = pwrite(fd_, from, bytes, static_cast<off_t>(offset));
            if (n <= 0) io_failed("write");
            from += n, offset += static_cast<uint64_t>(n), bytes -= static_cast<uint64_t>(n);
        }
    }

    void read(uint64_t offset, void* data, uint64_t bytes) const {
        for (auto* to = static_cast<char*>(data); bytes > 0;) {
            const ssize_t n = pread(fd_, to, bytes, static_cast<off_t>(offset));
            if (n <= 0) io_failed("read");
            to += n, offset += static_cast<uint64_t>(n), bytes -= static_cast<uint64_t>(n);
        }
    }

    /// Gives the memory of a large message back.
    void shrink(int index, uint64_t bytes) const {
        if (bytes > kKeep) fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(region(index)), static_cast<off_t>(bytes));
    }

    const int fd_;
    const double timeout_s_;
    Control* control_;
    std::atomic<bool> aborted_{false};
    std::mutex mutex_;  // one call at a time; guards what follows
    uint64_t number_ = 0;
    uint64_t highest_ = 0;  // bytes of this rank's region in use
};

// --- data types and reductions ---------------------------------------------------------------------------------------

/// Bytes of an element, or 0 for a type that a 910B does not transfer.
uint64_t size_of(HcclDataType type) {
    switch (type) {
        case HCCL_DATA_TYPE_INT8:
        case HCCL_DATA_TYPE_UINT8: return 1;
        case HCCL_DATA_TYPE_INT16:
        case HCCL_DATA_TYPE_UINT16:
        case HCCL_DATA_TYPE_FP16:
        case HCCL_DATA_TYPE_BFP16: return 2;
        case HCCL_DATA_TYPE_INT32:
        case HCCL_DATA_TYPE_UINT32:
        case HCCL_DATA_TYPE_FP32: return 4;
        case HCCL_DATA_TYPE_INT64:
        case HCCL_DATA_TYPE_UINT64:
        case HCCL_DATA_TYPE_FP64: return 8;
        default: return 0;
    }
}

bool reducible(HcclDataType type) {
    switch (type) {
        case HCCL_DATA_TYPE_INT8:
        case HCCL_DATA_TYPE_INT16:
        case HCCL_DATA_TYPE_INT32:
        case HCCL_DATA_TYPE_INT64:
        case HCCL_DATA_TYPE_FP16:
        case HCCL_DATA_TYPE_BFP16:
        case HCCL_DATA_TYPE_FP32: return true;
        default: return false;
    }
}

template <class T>
T combine(T a, T b, HcclReduceOp op) {
    switch (op) {
        case HCCL_REDUCE_SUM: return a + b;
        case HCCL_REDUCE_PROD: return a * b;
        case HCCL_REDUCE_MAX: return std::max(a, b);
        default: return std::min(a, b);
    }
}

/// In the order of ranks, so that all ranks get the same bits; 16-bit floats are accumulated in 32.
template <class T, class Accumulator>
void reduce_as(const Group& group, uint64_t offset, uint64_t count, HcclReduceOp op, void* out) {
    std::vector<T> part(count);
    std::vector<Accumulator> sum(count);
    for (int peer = 0; peer < group.size; ++peer) {
        group.get(peer, offset, part.data(), count * sizeof(T));
        for (uint64_t i = 0; i < count; ++i) {
            const auto value = static_cast<Accumulator>(part[i]);
            sum[i] = peer == 0 ? value : combine(sum[i], value, op);
        }
    }
    for (uint64_t i = 0; i < count; ++i) static_cast<T*>(out)[i] = static_cast<T>(sum[i]);
}

void reduce(const Group& group, uint64_t offset, uint64_t count, HcclDataType type, HcclReduceOp op, void* out) {
    switch (type) {
        case HCCL_DATA_TYPE_INT8: return reduce_as<int8_t, int64_t>(group, offset, count, op, out);
        case HCCL_DATA_TYPE_INT16: return reduce_as<int16_t, int64_t>(group, offset, count, op, out);
        case HCCL_DATA_TYPE_INT32: return reduce_as<int32_t, int64_t>(group, offset, count, op, out);
        case HCCL_DATA_TYPE_INT64: return reduce_as<int64_t, int64_t>(group, offset, count, op, out);
        case HCCL_DATA_TYPE_FP16: return reduce_as<c10::Half, float>(group, offset, count, op, out);
        case HCCL_DATA_TYPE_BFP16: return reduce_as<c10::BFloat16, float>(group, offset, count, op, out);
        default: return reduce_as<float, float>(group, offset, count, op, out);
    }
}

// --- handles ---------------------------------------------------------------------------------------------------------

struct Communicator : Tagged {
    static constexpr const char* kind = "HcclComm";
    explicit Communicator(std::shared_ptr<Group> group) : Tagged(kind), group(std::move(group)) {}
    const std::shared_ptr<Group> group;
};

/// What rank 0 hands out so that the others find the group's file.
struct RootInfo {
    char magic[8];
    int pid, fd;
};
constexpr char kRootMagic[8] = "npusim1";

HcclResult refuse(HcclResult code, const std::string& text) {
    fail(ACL_ERROR_INVALID_PARAM, "HCCL: " + text);
    return code;
}

HcclResult check(const char* name, HcclDataType type, bool reduces = false) {
    const bool fine = reduces ? reducible(type) : size_of(type) != 0;
    return fine ? HCCL_SUCCESS : refuse(HCCL_E_NOT_SUPPORT, std::string(name) + " does not support data type " + std::to_string(type));
}

/// Puts a collective on the stream.
void launch(HcclComm comm, aclrtStream stream, const Call& call, std::function<void(Group&)> bring, std::function<void(Group&)> take) {
    const auto group = checked<Communicator>(comm, call.name).group;
    const auto run = [=] { group->collect(call, [&] { bring(*group); }, [&] { take(*group); }); };
    enqueue(stream, run, call.name);
}

// Between HcclGroupStart and HcclGroupEnd sends and receives are gathered, to be made as one: no order among them may
// make ranks wait for each other.
struct Batch {
    HcclComm comm;
    aclrtStream stream;
    std::vector<Group::Transfer> transfers;
};
thread_local int group_depth = 0;
thread_local std::vector<Batch> batches;

void launch(const Batch& batch) {
    const auto group = checked<Communicator>(batch.comm, "HcclGroupEnd").group;
    enqueue(batch.stream, [group, transfers = batch.transfers] { group->transfer(transfers); }, "send/recv");
}

HcclResult add(HcclComm comm, aclrtStream stream, const std::vector<HcclSendRecvItem>& items) {
    Batch batch{comm, stream, {}};
    for (const HcclSendRecvItem& item : items) {
        if (const HcclResult error = check("send/recv", item.dataType)) return error;
        batch.transfers.push_back({item.sendRecvType == HCCL_SEND, static_cast<int>(item.remoteRank), item.buf, item.count * size_of(item.dataType)});
    }
    if (group_depth == 0) {
        launch(batch);
        return HCCL_SUCCESS;
    }
    for (Batch& open : batches) {
        if (open.comm != comm || open.stream != stream) continue;
        open.transfers.insert(open.transfers.end(), batch.transfers.begin(), batch.transfers.end());
        return HCCL_SUCCESS;
    }
    batches.push_back(batch);
    return HCCL_SUCCESS;
}

std::vector<uint64_t> counts(const void* values, const Group& group) {
    const auto* first = static_cast<const uint64_t*>(values);
    return {first, first + group.size};
}

double timeout_of(const HcclCommConfig* settings) {
    const bool set = settings != nullptr && settings->hcclExecTimeOut > 0 && std::getenv("NPUSIM_HCCL_TIMEOUT") == nullptr;
    return set ? settings->hcclExecTimeOut : config().hccl_timeout_s;
}

}  // namespace
}  // namespace npusim

using namespace npusim;

// --- communicators ---------------------------------------------------------------------------------------------------

NPUSIM_EXPORT HcclResult HcclGetRootInfo(HcclRootInfo* info) {
    RootInfo root{};
    std::memcpy(root.magic, kRootMagic, sizeof kRootMagic);
    root.pid = getpid();
    root.fd = memfd_create("npusim-hccl", MFD_CLOEXEC);
    if (root.fd < 0 || ftruncate(root.fd, int64_t{1} << 54) != 0) return refuse(HCCL_E_MEMORY, "cannot make the group's file");
    std::memset(info, 0, sizeof *info);
    std::memcpy(info->internal, &root, sizeof root);
    return HCCL_SUCCESS;
}

NPUSIM_EXPORT HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig* settings,
                                                    HcclComm* comm) {
    RootInfo root;
    std::memcpy(&root, info->internal, sizeof root);
    if (std::memcmp(root.magic, kRootMagic, sizeof kRootMagic) != 0) return refuse(HCCL_E_PARA, "this is no root info");
    if (size > kMaxRanks || rank >= size) return refuse(HCCL_E_PARA, "no such rank, or more ranks than are simulated");
    // The maker of the file keeps its descriptor: closing a second one would drop the lock that is held through the first.
    const int fd = root.pid == getpid() ? root.fd : open(("/proc/" + std::to_string(root.pid) + "/fd/" + std::to_string(root.fd)).c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return refuse(HCCL_E_TCP_CONNECT, "process " + std::to_string(root.pid) + ", which made the root info, is gone");
    const bool named = settings != nullptr && settings->hcclCommName[0] != '\0';
    const std::string name = named ? settings->hcclCommName : "p" + std::to_string(root.pid) + "f" + std::to_string(root.fd);
    trace("HcclCommInitRootInfoConfig: rank %u of %u in group %s", rank, size, name.c_str());
    try {
        const auto group = std::make_shared<Group>(fd, static_cast<int>(rank), static_cast<int>(size), name, timeout_of(settings));
        group->join();
        *comm = new Communicator(group);
    } catch (const std::exception& error) {
        return refuse(HCCL_E_TIMEOUT, error.what());
    }
    return HCCL_SUCCESS;
}

NPUSIM_EXPORT HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* info, uint32_t rank, HcclComm* comm) {
    return HcclCommInitRootInfoConfig(size, info, rank, nullptr, comm);
}

// All that torch_npu has to abort a collective: what still waits in the group ends with an error.
NPUSIM_EXPORT HcclResult HcclCommDestroy(HcclComm comm) {
    Communicator& communicator = checked<Communicator>(comm, __func__);
    trace("HcclCommDestroy: group %s", communicator.group->name.c_str());
    communicator.group->abort();
    delete &communicator;
    return HCCL_SUCCESS;
}

NPUSIM_EXPORT HcclResult HcclGetCommName(HcclComm comm, char* name) {
    std::snprintf(name, COMM_NAME_MAX_LENGTH, "%s", checked<Communicator>(comm, __func__).group->name.c_str());
    return HCCL_SUCCESS;
}

NPUSIM_EXPORT HcclResult HcclGetRankSize(HcclComm comm, uint32_t* size) {
    *size = static_cast<uint32_t>(checked<Communicator>(comm, __func__).group->size);
    return HCCL_SUCCESS;
}

NPUSIM_EXPORT HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
    *rank = static_cast<uint32_t>(checked<Communicator>(comm, __func__).group->rank);
    return HCCL_SUCCESS;
}

// A real HCCL reports only errors of its RDMA links here; those of a collective come through its stream.
NPUSIM_EXPORT HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult* error) {
    checked<Communicator>(comm, __func__);
    *error = HCCL_SUCCESS;
    return HCCL_SUCCESS;
}

NPUSIM_EXPORT uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }
NPUSIM_EXPORT HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

NPUSIM_EXPORT const char* HcclGetErrorString(HcclResult code) {
    return code == HCCL_SUCCESS ? "no error" : aclGetRecentErrMsg();
}

// --- collectives -----------------------------------------------------------------------------------------------------

NPUSIM_EXPORT HcclResult HcclAllReduce(void* send, void* recv, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                                       aclrtStream stream) {
    if (const HcclResult error = check("AllReduce", type, true)) return error;
    launch(comm, stream, make_call("AllReduce", type, count, op),
           [=](Group& group) { group.put(0, send, count * size_of(type)); },
           [=](Group& group) { reduce(group, 0, count, type, op, recv); });
    return HCCL_SUCCESS;
}

NPUSIM_EXPORT HcclResult HcclReduce(void* send, void* recv, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                                    HcclComm comm, aclrtStream stream) {
    if (const HcclResult error = check("Reduce", type, true)) return error;
    launch(comm, stream, make_call("Reduce", type, count, op, static_cast<int>(root)),
           [=](Group& group) { group.put(0, send, count * size_of(type)); },
           [=](Group& group) { if (group.rank == static_cast<int>(root)) reduce(group, 0, count, type, op, recv); });
    return HCCL_SUCCESS;
}

NPUSIM_EXPORT HcclResult HcclReduceScatter(void* send, void* recv, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                                           aclrtStream stream) {
    if (const HcclResult error = check("ReduceScatter", type, true)) return error;
    const uint64_t bytes = count * size_of(type);
    launch(comm, stream, make_call("ReduceScatter", type, count, op),
           [=](Group& group) { group.put(0, send, bytes * group.size); },
           [=](Group& group) { reduce(group, bytes * group.rank, count, type, op, recv); });
    return HCCL_SUCCESS;
}

NPUSIM_EXPORT HcclResult HcclAllGather(void* send, void* recv, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream) {
    if (const HcclResult error = check("AllGather", type)) return error;
    const uint64_t bytes = count * size_of(type);
    launch(comm, stream, make_call("AllGather", type, count),
           [=](Group& group) { group.put(0, send, bytes); },
           [=](Group& group) { for (int peer = 0; peer < group.size; ++peer) group.get(peer, 0, static_cast<char*>(recv) + bytes * peer, bytes); });
    return HCCL_SUCCESS;
}

NPUSIM_EXPORT HcclResult HcclBroadcast(void* data, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
    if (const HcclResult error = check("Broadcast", type)) return error;
    const uint64_t bytes = count * size_of(type);
    const int from = static_cast<int>(root);
    launch(comm, stream, make_call("Broadcast", type, count, -1, from),
           [=](Group& group) { if (group.rank == from) group.put(0, data, bytes); },
           [=](Group& group) { if (group.rank != from) group.get(from, 0, data, bytes); });
    return HCCL_SUCCESS;
}

NPUSIM_EXPORT HcclResult HcclScatter(void* send, void* recv, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                                     aclrtStream stream) {
    if (const HcclResult error = check("Scatter", type)) return error;
    const uint64_t bytes = count * size_of(type);
    const int from = static_cast<int>(root);
    launch(comm, stream, make_call("Scatter", type, count, -1, from),
           [=](Group& group) { if (group.rank == from) group.put(0, send, bytes * group.size); },
           [=](Group& group) { group.get(from, bytes * group.rank, recv, bytes); });
    return HCCL_SUCCESS;
}

NPUSIM_EXPORT HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType send_type, const void* recv, uint64_t recv_count,
                                      HcclDataType recv_type, HcclComm comm, aclrtStream stream) {
    if (const HcclResult error = check("AlltoAll", send_type)) return error;
    const uint64_t bytes = send_count * size_of(send_type);
    if (bytes != recv_count * size_of(recv_type)) return refuse(HCCL_E_PARA, "AlltoAll sends and receives different amounts");
    launch(comm, stream, make_call("AlltoAll", send_type, send_count),
           [=](Group& group) { group.put(0, send, bytes * group.size); },
           [=](Group& group) {
               auto* to = static_cast<char*>(const_cast<void*>(recv));
               for (int peer = 0; peer < group.size; ++peer) group.get(peer, bytes * group.rank, to + bytes * peer, bytes);
           });
    return HCCL_SUCCESS;
}

// Each rank's piece starts with its length, as sender and receiver name it separately.
NPUSIM_EXPORT HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_offsets, HcclDataType send_type,
                                       const void* recv, const void* recv_counts, const void* recv_offsets, HcclDataType recv_type,
                                       HcclComm comm, aclrtStream stream) {
    if (const HcclResult error = check("AlltoAllV", send_type)) return error;
    const Group& shape = *checked<Communicator>(comm, __func__).group;
    const uint64_t width = size_of(send_type);
    const auto bring = [=, count = counts(send_counts, shape), offset = counts(send_offsets, shape)](Group& group) {
        for (int peer = 0; peer < group.size; ++peer) {
            const uint64_t bytes = count[peer] * width;
            group.put(kPiece * peer, &bytes, sizeof bytes);
            group.put(kPiece * peer + sizeof bytes, static_cast<const char*>(send) + offset[peer] * width, bytes);
        }
    };
    const auto take = [=, count = counts(recv_counts, shape), offset = counts(recv_offsets, shape)](Group& group) {
        for (int peer = 0; peer < group.size; ++peer) {
            uint64_t bytes = 0;
            group.get(peer, kPiece * group.rank, &bytes, sizeof bytes);
            if (bytes != count[peer] * width)
                throw DeviceError(ACL_ERROR_RT_PARAM_INVALID, "rank " + std::to_string(peer) + " sends " + std::to_string(bytes) +
                                                                  " bytes, expected were " + std::to_string(count[peer] * width));
            auto* to = static_cast<char*>(const_cast<void*>(recv)) + offset[peer] * width;
            group.get(peer, kPiece * group.rank + sizeof bytes, to, bytes);
        }
    };
    if (send_type != recv_type) return refuse(HCCL_E_PARA, "AlltoAllV sends and receives different types");
    launch(comm, stream, make_call("AlltoAllV", send_type, 0), bring, take);
    return HCCL_SUCCESS;
}

// --- point to point --------------------------------------------------------------------------------------------------

NPUSIM_EXPORT HcclResult HcclSend(void* data, uint64_t count, HcclDataType type, uint32_t to, HcclComm comm, aclrtStream stream) {
    return add(comm, stream, {{HCCL_SEND, data, count, type, to}});
}

NPUSIM_EXPORT HcclResult HcclRecv(void* data, uint64_t count, HcclDataType type, uint32_t from, HcclComm comm, aclrtStream stream) {
    return add(comm, stream, {{HCCL_RECV, data, count, type, from}});
}

NPUSIM_EXPORT HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
    return add(comm, stream, {items, items + count});
}

NPUSIM_EXPORT HcclResult HcclGroupStart() {
    ++group_depth;
    return HCCL_SUCCESS;
}

NPUSIM_EXPORT HcclResult HcclGroupEnd() {
    if (--group_depth > 0) return HCCL_SUCCESS;
    for (const Batch& batch : batches) launch(batch);
    batches.clear();
    return HCCL_SUCCESS;
}
