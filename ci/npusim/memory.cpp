// Device memory with a quota per device across processes, virtual memory, sharing between processes, pinned host
// memory and copies.
//
// All device memory of a process is one sparse memory file; an allocation is a range of it that is never used again and
// whose pages go back to the system when it is freed. A range is named by process, file descriptor and offset, which is
// all that another process needs to map it; no name in a file system is left behind by a process that dies.
#include "runtime.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <map>
#include <mutex>

namespace npusim {
namespace {

constexpr uint64_t kGranule = 2 << 20;  // offsets are multiples of it, as huge pages' are; a sparse file has room
constexpr uint64_t kPage = 4096;

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

/// What each process of the node has allocated on each device, in a file. A living process holds the
/// lock on its slot, which the system takes from one that ends however it does: that tells whose numbers count.
class Ledger {
public:
    Ledger() {
        fd_ = open(config().node.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd_ < 0 || ftruncate(fd_, sizeof(Slot) * kSlots) != 0) misuse("NPUSIM_NODE: cannot use the file " + config().node);
        void* map = mmap(nullptr, sizeof(Slot) * kSlots, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
        if (map == MAP_FAILED) misuse("NPUSIM_NODE: cannot map the file " + config().node);
        slots_ = static_cast<Slot*>(map);
        Lock lock(*this);
        while (mine_ < kSlots && !try_lock(mine_)) ++mine_;
        if (mine_ == kSlots) misuse("more processes than a node has room for");
        slots_[mine_] = Slot{};
    }

    /// Counts the bytes as this process's if the device has as many free.
    bool take(int device, uint64_t bytes) {
        Lock lock(*this);
        if (sum(device) + bytes > config().memory) return false;
        slots_[mine_].used[device] += bytes;
        return true;
    }

    void give(int device, uint64_t bytes) {
        Lock lock(*this);
        slots_[mine_].used[device] -= bytes;
    }

    uint64_t used(int device) {
        Lock lock(*this);
        return sum(device);
    }

private:
    struct Slot {
        uint64_t used[kMaxDevices];
    };
    static constexpr int kSlots = 512;

    /// Excludes the other threads and, by the lock on the byte after the slots', the other processes.
    struct Lock {
        explicit Lock(Ledger& ledger) : ledger(ledger), guard(ledger.mutex_) { ledger.set_lock(kSlots, F_WRLCK, F_SETLKW); }
        ~Lock() { ledger.set_lock(kSlots, F_UNLCK, F_SETLK); }
        Ledger& ledger;
        std::lock_guard<std::mutex> guard;
    };

    bool set_lock(int byte, short type, int command) {
        struct flock lock = {};
        lock.l_type = type;
        lock.l_whence = SEEK_SET;
        lock.l_start = byte;
        lock.l_len = 1;
        int result;
        while ((result = fcntl(fd_, command, &lock)) != 0 && errno == EINTR) {
        }
        return result == 0 && (command != F_GETLK || lock.l_type != F_UNLCK);
    }
    bool try_lock(int byte) { return set_lock(byte, F_WRLCK, F_SETLK); }
    bool locked_by_other(int byte) { return set_lock(byte, F_WRLCK, F_GETLK); }

    uint64_t sum(int device) {
        uint64_t total = 0;
        for (int slot = 0; slot < kSlots; ++slot)
            if (slots_[slot].used[device] != 0 && (slot == mine_ || locked_by_other(slot))) total += slots_[slot].used[device];
        return total;
    }

    std::mutex mutex_;
    int fd_ = -1;
    int mine_ = 0;
    Slot* slots_ = nullptr;
};

Ledger& ledger() {
    static auto* ledger = new Ledger;
    return *ledger;
}

/// A range of some process's memory file.
struct Range {
    int fd;  // in this process
    uint64_t offset;
    uint64_t bytes;
    int device;
};

int memory_file() {
    static const int fd = [] {
        const int fd = memfd_create("npusim-device-memory", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, int64_t{1} << 52) != 0) misuse("cannot make the memory file");
        return fd;
    }();
    return fd;
}

/// What lies where: mappings of device memory and registered host memory, by their first address.
struct Place {
    aclrtMemLocationType type;
    Range range;
    bool owned;
};

struct Places {
    std::mutex mutex;
    std::map<uintptr_t, Place> all;
};

Places& places() {
    static auto* places = new Places;
    return *places;
}

void add_place(const void* address, Place place) {
    std::lock_guard<std::mutex> guard(places().mutex);
    places().all[reinterpret_cast<uintptr_t>(address)] = place;
}

bool remove_place(const void* address, Place* place) {
    std::lock_guard<std::mutex> guard(places().mutex);
    const auto found = places().all.find(reinterpret_cast<uintptr_t>(address));
    if (found == places().all.end()) return false;
    *place = found->second;
    places().all.erase(found);
    return true;
}

/// The place that the address lies in, if any; `base` becomes its first address.
bool find_place(const void* pointer, Place* place, uintptr_t* base) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard<std::mutex> guard(places().mutex);
    auto next = places().all.upper_bound(address);
    if (next == places().all.begin()) return false;
    --next;
    if (address >= next->first + next->second.range.bytes) return false;
    *place = next->second;
    *base = next->first;
    return true;
}

bool fault_is_due(uint64_t bytes) {
    static std::atomic<uint64_t> calls{0}, total{0};
    const uint64_t call = ++calls;
    const uint64_t sum = total += bytes;
    return (config().oom_at != 0 && call >= config().oom_at) || (config().oom_after != 0 && sum > config().oom_after);
}

aclError take_range(int device, uint64_t wanted, Range* range) {
    static std::atomic<uint64_t> next{0};
    const uint64_t bytes = round_up(wanted, kPage);
    if (fault_is_due(bytes) || !ledger().take(device, bytes))
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of memory: " + std::to_string(bytes) + " bytes wanted on device " +
                                                        std::to_string(device) + ", " +
                                                        std::to_string(config().memory - ledger().used(device)) + " free");
    *range = {memory_file(), next.fetch_add(round_up(bytes, kGranule)), bytes, device};
    return ACL_SUCCESS;
}

void give_range(const Range& range) {
    fallocate(range.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(range.offset), static_cast<off_t>(range.bytes));
    ledger().give(range.device, range.bytes);
}

void* map_range(const Range& range, void* where = nullptr) {
    return mmap(where, range.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (where != nullptr ? MAP_FIXED : 0), range.fd,
                static_cast<off_t>(range.offset));
}

int open_memory_of(int pid, int fd) { return open(("/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC); }

/// Physical memory of the virtual-memory interface; unmapped by itself.
struct Physical : Tagged {
    static constexpr const char* kind = "physical memory";
    Physical(Range range, bool owned) : Tagged(kind), range(range), owned(owned) {}
    Range range;
    bool owned;  // false: another process's
};

bool is_known(const void* pointer) {
    Place place;
    uintptr_t base;
    return find_place(pointer, &place, &base);
}

aclError no_device() { return fail(ACL_ERROR_RT_CONTEXT_NULL, "no device is set in this thread"); }

}  // namespace

uint64_t device_memory_used(int device) { return ledger().used(device); }

}  // namespace npusim

using namespace npusim;

// --- device memory ---------------------------------------------------------------------------------------------------

NPUSIM_EXPORT aclError aclrtMalloc(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
    if (current_device() < 0) return no_device();
    Range range;
    if (const aclError error = take_range(current_device(), bytes, &range)) return error;
    *pointer = map_range(range);
    add_place(*pointer, {ACL_MEM_LOCATION_TYPE_DEVICE, range, true});
    trace("malloc %zu bytes on device %d: %p", bytes, range.device, *pointer);
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtMallocAlign32(void** pointer, size_t bytes, aclrtMemMallocPolicy policy) {
    return aclrtMalloc(pointer, bytes, policy);
}

NPUSIM_EXPORT aclError aclrtFree(void* pointer) {
    Place place;
    if (!remove_place(pointer, &place)) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree: not an allocation");
    trace("free %p", pointer);
    munmap(pointer, place.range.bytes);
    give_range(place.range);
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
    if (current_device() < 0) return no_device();
    *total = config().memory;
    *free = *total - device_memory_used(current_device());
    return ACL_SUCCESS;
}

// --- virtual memory --------------------------------------------------------------------------------------------------

namespace {
std::mutex reservations_mutex;
std::map<void*, size_t> reservations;  // guarded by it

void* reserve(void* where, size_t bytes) {
    const int fixed = where != nullptr ? MAP_FIXED : 0;
    return mmap(where, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
}
}  // namespace

NPUSIM_EXPORT aclError aclrtReserveMemAddress(void** address, size_t bytes, size_t, void*, uint64_t) {
    *address = reserve(nullptr, bytes);
    if (*address == MAP_FAILED) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no address range of this size is free");
    std::lock_guard<std::mutex> guard(reservations_mutex);
    reservations[*address] = bytes;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtReleaseMemAddress(void* address) {
    std::lock_guard<std::mutex> guard(reservations_mutex);
    const auto found = reservations.find(address);
    if (found == reservations.end()) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtReleaseMemAddress: not a reservation");
    munmap(address, found->second);
    reservations.erase(found);
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp*, aclrtMemGranularityOptions, size_t* granularity) {
    *granularity = kGranule;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp* property, uint64_t) {
    if (property->location.type != ACL_MEM_LOCATION_TYPE_DEVICE) unsimulated("aclrtMallocPhysical of host memory");
    Range range;
    if (const aclError error = take_range(static_cast<int>(property->location.id), bytes, &range)) return error;
    *handle = new Physical(range, true);
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    Physical& physical = checked<Physical>(handle, __func__);
    if (physical.owned) give_range(physical.range);
    else close(physical.range.fd);
    delete &physical;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtMapMem(void* address, size_t bytes, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
    Range range = checked<Physical>(handle, __func__).range;
    range.offset += offset;
    range.bytes = bytes;
    if (map_range(range, address) == MAP_FAILED) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem: not reserved");
    add_place(address, {ACL_MEM_LOCATION_TYPE_DEVICE, range, false});
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtUnmapMem(void* address) {
    Place place;
    if (!remove_place(address, &place)) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtUnmapMem: nothing is mapped there");
    reserve(address, place.range.bytes);
    return ACL_SUCCESS;
}

// --- sharing between processes ---------------------------------------------------------------------------------------

// A handle has 64 bits for process (22, Linux' limit), descriptor (10) and offset in granules (32).
NPUSIM_EXPORT aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, aclrtMemHandleType, uint64_t, uint64_t* shareable) {
    const Range& range = checked<Physical>(handle, __func__).range;
    *shareable = static_cast<uint64_t>(getpid()) << 42 | static_cast<uint64_t>(range.fd) << 32 | range.offset / kGranule;
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) { return ACL_SUCCESS; }

NPUSIM_EXPORT aclError aclrtMemImportFromShareableHandle(uint64_t shareable, int32_t device, aclrtDrvMemHandle* handle) {
    const int fd = open_memory_of(static_cast<int>(shareable >> 42), static_cast<int>(shareable >> 32 & 0x3ff));
    if (fd < 0) return fail(ACL_ERROR_RT_IPC_ERROR, "the process that shared this memory is gone");
    *handle = new Physical({fd, (shareable & 0xffffffff) * kGranule, 0, device}, false);
    return ACL_SUCCESS;
}

namespace {
std::mutex imports_mutex;
std::map<std::string, void*> imports;  // guarded by it; by key
}  // namespace

NPUSIM_EXPORT aclError aclrtIpcMemGetExportKey(void* pointer, size_t bytes, char* key, size_t length, uint64_t) {
    Place place;
    uintptr_t base;
    if (!find_place(pointer, &place, &base) || place.type != ACL_MEM_LOCATION_TYPE_DEVICE)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemGetExportKey: not device memory");
    const uint64_t offset = place.range.offset + reinterpret_cast<uintptr_t>(pointer) - base;
    std::snprintf(key, length, "npusim %d %d %lu %zu", getpid(), place.range.fd, offset, bytes);
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtIpcMemSetImportPid(const char*, int32_t*, size_t) { return ACL_SUCCESS; }

NPUSIM_EXPORT aclError aclrtIpcMemImportByKey(void** pointer, const char* key, uint64_t) {
    int pid, fd;
    Range range{};
    if (std::sscanf(key, "npusim %d %d %lu %lu", &pid, &fd, &range.offset, &range.bytes) != 4)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemImportByKey: no key");
    range.fd = open_memory_of(pid, fd);
    if (range.fd < 0) return fail(ACL_ERROR_RT_IPC_ERROR, "process " + std::to_string(pid) + ", which shared this memory, is gone");
    range.device = current_device();
    *pointer = map_range(range);
    add_place(*pointer, {ACL_MEM_LOCATION_TYPE_DEVICE, range, false});
    std::lock_guard<std::mutex> guard(imports_mutex);
    imports[key] = *pointer;
    return ACL_SUCCESS;
}

// Called by both sides: here the exporter has nothing to close, as the key is only a name.
NPUSIM_EXPORT aclError aclrtIpcMemClose(const char* key) {
    std::lock_guard<std::mutex> guard(imports_mutex);
    const auto found = imports.find(key);
    if (found == imports.end()) return ACL_SUCCESS;
    Place place;
    remove_place(found->second, &place);
    munmap(found->second, place.range.bytes);
    close(place.range.fd);
    imports.erase(found);
    return ACL_SUCCESS;
}

// --- pinned host memory ----------------------------------------------------------------------------------------------

NPUSIM_EXPORT aclError aclrtHostRegisterV2(void* pointer, uint64_t bytes, uint32_t) {
    if (is_known(pointer)) return fail(ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "this host memory is registered already");
    add_place(pointer, {ACL_MEM_LOCATION_TYPE_HOST, {-1, 0, bytes, -1}, false});
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtHostRegister(void* pointer, uint64_t bytes, aclrtHostRegisterType, void** device_pointer) {
    *device_pointer = pointer;
    return aclrtHostRegisterV2(pointer, bytes, 0);
}

NPUSIM_EXPORT aclError aclrtHostUnregister(void* pointer) {
    Place place;
    if (!remove_place(pointer, &place)) return fail(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED, "this host memory is not registered");
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtMallocHost(void** pointer, size_t bytes) {
    *pointer = mmap(nullptr, round_up(bytes, kPage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*pointer == MAP_FAILED) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no memory left");
    return aclrtHostRegisterV2(*pointer, round_up(bytes, kPage), 0);
}

NPUSIM_EXPORT aclError aclrtMallocHostWithCfg(void** pointer, uint64_t bytes, aclrtMallocConfig*) { return aclrtMallocHost(pointer, bytes); }

NPUSIM_EXPORT aclError aclrtFreeHost(void* pointer) {
    Place place;
    if (!remove_place(pointer, &place)) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreeHost: not from aclrtMallocHost");
    munmap(pointer, place.range.bytes);
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
    Place place;
    uintptr_t base;
    const bool known = find_place(pointer, &place, &base);
    *attributes = {};
    attributes->location.type = known ? place.type : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    attributes->location.id = known && place.range.device >= 0 ? static_cast<uint32_t>(place.range.device) : 0;
    return ACL_SUCCESS;
}

// --- copies ----------------------------------------------------------------------------------------------------------

namespace {
aclError too_large(const char* call, size_t bytes, size_t room) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, std::string(call) + ": " + std::to_string(bytes) + " bytes into " + std::to_string(room));
}
}  // namespace

NPUSIM_EXPORT aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind) {
    if (bytes > room) return too_large(__func__, bytes, room);
    std::memcpy(to, from, bytes);
    return ACL_SUCCESS;
}

// As CANN does: with pageable host memory on one side, the copy waits for the stream and is done when the call returns.
NPUSIM_EXPORT aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind, aclrtStream stream) {
    if (bytes > room) return too_large(__func__, bytes, room);
    enqueue(stream, [to, from, bytes] { std::memcpy(to, from, bytes); }, __func__);
    return is_known(to) && is_known(from) ? ACL_SUCCESS : synchronize(stream);
}

NPUSIM_EXPORT aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                                                     aclrtStream stream) {
    return aclrtMemcpyAsync(to, room, from, bytes, kind, stream);
}

NPUSIM_EXPORT aclError aclrtMemset(void* pointer, size_t room, int32_t value, size_t bytes) {
    if (bytes > room) return too_large(__func__, bytes, room);
    std::memset(pointer, value, bytes);
    return ACL_SUCCESS;
}

NPUSIM_EXPORT aclError aclrtMemsetAsync(void* pointer, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
    if (bytes > room) return too_large(__func__, bytes, room);
    enqueue(stream, [pointer, value, bytes] { std::memset(pointer, value, bytes); }, __func__);
    return ACL_SUCCESS;
}
