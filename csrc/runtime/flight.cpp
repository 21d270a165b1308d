#include "runtime/flight.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <span>

#include "core/clock.h"
#include "core/error.h"
#include "core/fd.h"
#include "core/fork_mark.h"
#include "core/host.h"

namespace pycoll {
namespace {

// Places are those of pycoll/flight/layout.py, in words.
constexpr uint64_t kMagic = 0x3154484749'4C46;  // "FLIGHT1"
constexpr size_t kPage = 4096;
constexpr size_t kHead = kPage / sizeof(uint64_t);  // of the file, and of each region
constexpr size_t kRing = 1024;                      // records
constexpr size_t kRecord = 8;
constexpr size_t kRegion = kHead + 2 * kRing * kRecord;
constexpr size_t kRegionBytes = kRegion * sizeof(uint64_t);

// Of the file's header. Two anchors tie ticks to the time of day: when the file was made, and when
// it was copied.
enum FileWord : size_t { kFileMagic, kPid, kRegions, kTicks0, kTime0, kTicks1, kTime1, kHost = 8 };
constexpr size_t kHostBytes = 512;

enum RegionWord : size_t {
  kLife,
  kRank,
  kWorld,
  kQueued,
  kEnded,
  kPosted,
  kEndedMessages,
  kMade,      // ticks
  kGone,      // ticks, of the end
  kReleased,  // 1: may be given to another group
  kKey = 16,
  kName = 24,
  kTransport = 64,
  kReason = 72,
};
constexpr size_t kKeyBytes = 64, kNameBytes = 320, kTransportBytes = 64, kReasonBytes = 2048;

enum Life : uint64_t { kFree, kLive, kClosed, kDied };

constexpr auto kRelaxed = std::memory_order_relaxed;

uint64_t time_of_day() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<Nanoseconds>(now).count());
}

void store(FlightWord* to, std::span<const uint64_t> words) {
  for (const uint64_t word : words) (to++)->store(word, kRelaxed);
}

// Zero-terminated, cut to fit.
void store_text(FlightWord* to, std::string_view text, size_t bytes) {
  std::vector<uint64_t> words(bytes / sizeof(uint64_t));
  std::memcpy(words.data(), text.data(), std::min(text.size(), bytes - 1));
  store(to, words);
}

FlightWord* collective(FlightWord* region, uint64_t sequence) {
  return region + kHead + (sequence % kRing) * kRecord;
}

FlightWord* message_record(FlightWord* region, uint64_t number) {
  return region + kHead + (kRing + number % kRing) * kRecord;
}

uint64_t tagged(uint64_t number, FlightState state) {
  return number << 2 | static_cast<uint64_t>(state);
}

// The first word is not that of the old record while the rest changes.
void write_record(FlightWord* record, uint64_t number, std::span<const uint64_t, 5> words) {
  record[0].store(0, kRelaxed);
  std::atomic_thread_fence(std::memory_order_release);
  record[1].store(ticks(), kRelaxed);
  record[2].store(0, kRelaxed);
  store(record + 3, words);
  record[0].store(tagged(number, FlightState::under_way), std::memory_order_release);
}

// One that was overwritten meanwhile stays as it is.
void end_record(FlightWord* record, uint64_t number, FlightState how) {
  if (record[0].load(kRelaxed) != tagged(number, FlightState::under_way)) return;
  record[2].store(ticks(), kRelaxed);
  record[0].store(tagged(number, how), std::memory_order_release);
}

void* map(int fd, size_t offset, size_t bytes) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* base =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, static_cast<off_t>(offset));
  if (base == MAP_FAILED) fail(ErrorKind::system, errno_text("mmap of a flight recorder"));
  return base;
}

FlightWord* words_of(const Mapping& mapping) {
  return reinterpret_cast<FlightWord*>(mapping.data());
}

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "host";
}

void write_file(const std::string& path, const std::string& content) {
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd) fail(ErrorKind::system, errno_text(("opening " + path).c_str()));
  for (size_t done = 0; done < content.size();) {
    const ssize_t wrote = ::write(fd.get(), content.data() + done, content.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) fail(ErrorKind::system, errno_text(("writing " + path).c_str()));
    done += static_cast<size_t>(wrote);
  }
}

}  // namespace

FlightLog::~FlightLog() {
  if (region_[kLife].load(kRelaxed) == kLive) {
    region_[kGone].store(ticks(), kRelaxed);
    region_[kLife].store(kClosed, kRelaxed);
  }
  region_[kReleased].store(1, std::memory_order_release);
}

void FlightLog::queued(uint64_t sequence) {
  region_[kQueued].store(sequence, kRelaxed);
}

void FlightLog::started(const CallHeader& call) {
  const auto words = std::bit_cast<std::array<uint64_t, 5>>(call);
  write_record(collective(region_, call.sequence), call.sequence, words);
}

void FlightLog::ended_at_once(uint64_t sequence) {
  region_[kEnded].store(sequence, kRelaxed);
}

void FlightLog::ended(uint64_t sequence, FlightState how) {
  end_record(collective(region_, sequence), sequence, how);
  region_[kEnded].store(sequence, kRelaxed);
}

uint64_t FlightLog::posted(const MessageRequest& message) {
  const uint64_t number = ++messages_;
  const auto half = [](int value) { return static_cast<uint64_t>(static_cast<uint32_t>(value)); };
  const bool any = message.receives && message.peer == kAnySource;
  const std::array<uint64_t, 5> words = {
      message.code.codec != 0 ? message.code.count : message.block.count,
      half(any ? -1 : message.peer) | half(message.tag) << 32,
      static_cast<uint64_t>(message.code.codec != 0 ? message.code.dtype : message.dtype) |
          uint64_t{message.receives} << 8 | uint64_t{message.code.codec} << 16,
      half(-1),
      0,
  };
  write_record(message_record(region_, number), number, words);
  region_[kPosted].store(number, kRelaxed);
  return number;
}

void FlightLog::ended_message(uint64_t number, int source, FlightState how) {
  FlightWord* record = message_record(region_, number);
  if (record[0].load(kRelaxed) >> 2 == number) {
    record[6].store(static_cast<uint32_t>(source), kRelaxed);
    end_record(record, number, how);
  }
  region_[kEndedMessages].fetch_add(1, kRelaxed);
}

void FlightLog::died(std::string_view reason) {
  store_text(region_ + kReason, reason, kReasonBytes);
  region_[kGone].store(ticks(), kRelaxed);
  region_[kLife].store(kDied, std::memory_order_release);
}

// Of one process. Only the recorder's lock holder changes it.
struct FlightRecorder::File {
  File() : fd(::memfd_create("pycoll-flight", MFD_CLOEXEC)) {
    if (fd && ::ftruncate(fd.get(), kPage) != 0) fd.reset();
    head = Mapping(map(fd.get(), 0, kPage), kPage);
    FlightWord* words = words_of(head);
    store(words + kPid, std::array{static_cast<uint64_t>(::getpid())});
    store(words + kTicks0, std::array{ticks(), time_of_day()});
    store_text(words + kHost, host_identity() + " " + host_name(), kHostBytes);
    words[kFileMagic].store(kMagic, std::memory_order_release);
  }

  FlightWord* add() {
    const size_t offset = kPage + regions.size() * kRegionBytes;
    // A limit on the size of files, say: then only dumps have this group.
    const bool grown = fd && ::ftruncate(fd.get(), static_cast<off_t>(offset + kRegionBytes)) == 0;
    regions.emplace_back(map(grown ? fd.get() : -1, offset, kRegionBytes), kRegionBytes);
    // Readers of the file count on all before it.
    whole = whole && grown;
    if (whole) words_of(head)[kRegions].store(regions.size(), std::memory_order_release);
    return words_of(regions.back());
  }

  const ForkMark fork_mark;
  UniqueFd fd;  // none left: then only this process can read its records
  Mapping head;
  std::vector<Mapping> regions;
  bool whole = true;  // all of them are in the file
};

// That of the group which was closed first: so there are as many as groups were ever open at once,
// and a closed one stays readable until its region is needed.
FlightWord* FlightRecorder::free_region(File& file) {
  FlightWord* oldest = nullptr;
  for (const Mapping& mapping : file.regions) {
    FlightWord* words = words_of(mapping);
    // Acquire: pairs with the log's end, after which nobody writes there.
    if (words[kReleased].load(std::memory_order_acquire) == 0) continue;
    if (oldest == nullptr || words[kGone].load(kRelaxed) < oldest[kGone].load(kRelaxed)) {
      oldest = words;
    }
  }
  if (oldest == nullptr) return file.add();
  for (size_t i = 0; i < kRegion; ++i) oldest[i].store(0, kRelaxed);
  return oldest;
}

std::unique_ptr<FlightLog> FlightRecorder::open(const FlightGroup& group) {
  const std::lock_guard lock(mutex_);
  FlightWord* region = nullptr;
  try {
    if (file_ == nullptr || file_->fork_mark.in_child()) file_ = std::make_shared<File>();
    region = free_region(*file_);
  } catch (const Error&) {
    return nullptr;
  }
  region[kRank].store(static_cast<uint64_t>(group.rank), kRelaxed);
  region[kWorld].store(static_cast<uint64_t>(group.world_size), kRelaxed);
  region[kMade].store(ticks(), kRelaxed);
  store_text(region + kKey, group.key, kKeyBytes);
  store_text(region + kName, group.name, kNameBytes);
  store_text(region + kTransport, group.transport, kTransportBytes);
  region[kLife].store(kLive, std::memory_order_release);
  return std::make_unique<FlightLog>(region, file_);
}

std::string FlightRecorder::snapshot() {
  const std::lock_guard lock(mutex_);
  if (file_ == nullptr || file_->fork_mark.in_child()) return "";
  std::string copy(kPage + file_->regions.size() * kRegionBytes, '\0');
  char* to = copy.data();
  // A record that is being written has another number afterwards: it is left out.
  const auto settle = [](const FlightWord* region, char* copied) {
    for (size_t i = kHead; i < kRegion; i += kRecord) {
      uint64_t tag = 0;
      std::memcpy(&tag, copied + i * sizeof(tag), sizeof(tag));
      if (region[i].load(kRelaxed) >> 2 != tag >> 2) {
        std::memset(copied + i * sizeof(tag), 0, sizeof(tag));
      }
    }
  };
  const auto append = [&to](const FlightWord* from, size_t words) {
    for (size_t i = 0; i < words; ++i, to += sizeof(uint64_t)) {
      const uint64_t word = from[i].load(std::memory_order_acquire);
      std::memcpy(to, &word, sizeof(word));
    }
  };
  append(words_of(file_->head), kHead);
  const auto put = [&copy](FileWord place, std::span<const uint64_t> words) {
    std::memcpy(copy.data() + place * sizeof(uint64_t), words.data(), words.size_bytes());
  };
  put(kTicks1, std::array{ticks(), time_of_day()});
  put(kRegions, std::array{uint64_t{file_->regions.size()}});
  for (const Mapping& mapping : file_->regions) {
    char* copied = to;
    append(words_of(mapping), kRegion);
    settle(words_of(mapping), copied);
  }
  return copy;
}

std::string FlightRecorder::dump(const std::string& directory) {
  const std::string records = snapshot();
  if (records.empty()) return "";
  const std::string path =
      concat(directory, "/pycoll-", host_name(), "-", ::getpid(), "-", label_, ".flight");
  // A reader never sees a part of it.
  const std::string unfinished = path + ".tmp";
  write_file(unfinished, records);
  if (::rename(unfinished.c_str(), path.c_str()) != 0) {
    fail(ErrorKind::system, errno_text(("renaming " + unfinished).c_str()));
  }
  return path;
}

}  // namespace pycoll
