#include "group_world.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "core/error.h"
#include "core/fd.h"
#include "runtime/store.h"
#include "sim/control.h"
#include "transport/network.h"
#include "transport/shm/shm_transport.h"

namespace pycoll::sim::tests {
namespace {

namespace fs = std::filesystem;

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (fs::temp_directory_path() / "pycoll-groups-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// A file a key, which appears with all that is in it.
class DirectoryStore final : public Store {
 public:
  explicit DirectoryStore(fs::path where) : where_(std::move(where)) {}

  void set(const std::string& key, const std::string& value) override {
    const fs::path draft = where_ / (file_of(key) + "." + std::to_string(::getpid()));
    std::ofstream(draft, std::ios::binary) << value;
    fs::rename(draft, where_ / file_of(key));
  }
  std::optional<std::string> get(const std::string& key, Nanoseconds timeout) override {
    const Deadline deadline = Deadline::after(timeout);
    while (!fs::exists(where_ / file_of(key))) {
      if (deadline.passed()) return std::nullopt;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::ostringstream text;
    text << std::ifstream(where_ / file_of(key), std::ios::binary).rdbuf();
    return text.str();
  }
  std::optional<std::string> peek(const std::string& key) override { return get(key, {}); }
  void remove(const std::string& key) override { fs::remove(where_ / file_of(key)); }

 private:
  static std::string file_of(std::string key) {
    for (char& c : key) {
      if (c == '/') c = '_';
    }
    return key;
  }
  fs::path where_;
};

void forbid_peer_access(int device, int devices) {
  for (int peer = 0; peer < devices; ++peer) {
    if (peer != device) set_peer_access(device, peer, false);
  }
}

// Where ranks meet. Threads share one mapping of a segment: between two ThreadSanitizer is blind.
struct Place {
  TemporaryDirectory directory;
  std::shared_ptr<shm::SegmentMapper> mapper = std::make_shared<shm::SegmentMapper>(true);
};

void join_namespace(pid_t of, const char* kind, int type) {
  const std::string theirs = concat("/proc/", of, "/ns/", kind);
  const std::string own = concat("/proc/self/ns/", kind);
  struct stat there {
  }, here{};
  if (::stat(theirs.c_str(), &there) != 0 || ::stat(own.c_str(), &here) != 0) {
    throw std::runtime_error(errno_text(theirs.c_str()));
  }
  if (there.st_ino == here.st_ino) return;
  const UniqueFd space(::open(theirs.c_str(), O_RDONLY | O_CLOEXEC));
  if (::setns(space.get(), type) != 0) throw std::runtime_error(errno_text("setns"));
}

// To pycoll, processes are on one host when they have the same namespaces (core/host.h): the first
// rank of each further host makes a mount namespace, the others join it.
void move_to_host(const std::string& hosts, Meeting& meeting) {
  if (hosts.empty()) return;
  const auto first = hosts.find(hosts[static_cast<size_t>(meeting.rank)]);
  const bool moves = first != 0;
  const bool leads = first == static_cast<size_t>(meeting.rank);
  if (moves && leads && ::unshare(CLONE_NEWNS) != 0 &&
      ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) {
    throw std::runtime_error(errno_text("unshare of the mount namespace"));
  }
  const std::vector<pid_t> processes = meeting.exchange(::getpid());
  if (moves && !leads) {
    join_namespace(processes[first], "user", CLONE_NEWUSER);
    join_namespace(processes[first], "mnt", CLONE_NEWNS);
  }
  meeting.barrier();
}

int device_of(const GroupSettings& settings, int rank, int devices) {
  if (settings.hosts.empty()) return rank % devices;
  const auto end = settings.hosts.begin() + rank;
  return static_cast<int>(std::count(settings.hosts.begin(), end, *end)) % devices;
}

void run_rank(const GroupSettings& settings, const Place& place, Meeting& meeting,
              const std::function<void(GroupRank&)>& body, bool opens) {
  move_to_host(settings.hosts, meeting);
  DirectoryStore store(place.directory.path());
  NetworkRegistry networks;
  BootstrapRequest request;
  request.store = &store;
  request.prefix = "group/";
  request.rank = meeting.rank;
  request.world_size = meeting.size;
  request.config = Config::from_env();
  std::shared_ptr<Connector> connector;
  if (settings.threads) {
    connector = std::make_shared<shm::ShmConnector>(place.mapper);
  } else {
    connector = networks.network_for("group", request.config);
  }
  auto control = Communicator::make(request, connector, std::chrono::seconds(60));
  const auto library = DeviceLibrary::load(PYCOLL_SIMGPU);
  const int devices = library->device_count();
  const int device = device_of(settings, meeting.rank, devices);
  if (settings.apart) forbid_peer_access(device, devices);
  GroupRank rank{meeting.rank, meeting.size, device,        meeting,         control,
                 library,      nullptr,      settings.seed, settings.threads};
  if (opens) {
    rank.group = library->open(control, device);
    if (cudaSetDevice(device) != cudaSuccess) throw std::runtime_error("cudaSetDevice failed");
  }
  body(rank);
  rank.group.reset();
  const Counters counted = counters();
  if (counted.spins_across_processes != 0) {
    const uint64_t spins = counted.spins_across_processes;
    throw std::runtime_error(concat("a kernel waited for another process: ", spins, " spins"));
  }
  if (!settings.threads && counted.contexts > 1)
    throw std::runtime_error("a GPU of another rank was used");
}

void run_all(const GroupSettings& settings, const std::function<void(GroupRank&)>& body,
             const std::function<int(int rank)>& expected, bool opens) {
  const Place place;
  const auto work = [&](Meeting& meeting) { run_rank(settings, place, meeting, body, opens); };
  const auto run = settings.threads ? &run_threads : &run_processes;
  const std::vector<int> statuses = run(settings.ranks, work);
  for (int rank = 0; rank < settings.ranks; ++rank) {
    const int wanted = expected ? expected(rank) : 0;
    const int status = statuses[static_cast<size_t>(rank)];
    if (status == wanted) continue;
    throw std::runtime_error(
        concat("rank ", rank, " ended with wait status ", status, ", not ", wanted));
  }
}

}  // namespace

void run_group(const GroupSettings& settings, const std::function<void(GroupRank&)>& body,
               const std::function<int(int rank)>& expected) {
  run_all(settings, body, expected, true);
}

void run_without_group(const GroupSettings& settings, const std::function<void(GroupRank&)>& body) {
  run_all(settings, body, nullptr, false);
}

}  // namespace pycoll::sim::tests
