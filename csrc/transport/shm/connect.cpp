// How ranks of one host find each other: every rank listens on an abstract unix socket; rank r
// connects to all lower ranks and accepts all higher ones. Each side shows the job key and passes
// its segment.
#include <sys/stat.h>
#include <sys/utsname.h>

#include <fstream>
#include <new>

#include "core/error.h"
#include "transport/shm/shm_transport.h"

namespace pycoll::shm {
namespace {

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string namespace_id(const char* path) {
  struct stat status {};
  if (::stat(path, &status) != 0) return "unknown";
  return std::to_string(status.st_ino);
}

// "shm 1 <host> <address>"
struct Description {
  std::string host;
  std::string address;
};

Description parse(const std::string& text) {
  std::istringstream in(text);
  std::string tag;
  std::string version;
  Description description;
  in >> tag >> version >> description.host >> description.address;
  if (tag != "shm" || version != "1") return {};
  return description;
}

}  // namespace

std::string host_identity() {
  std::string boot = first_line("/proc/sys/kernel/random/boot_id");
  if (boot.empty()) {
    utsname names{};
    ::uname(&names);
    boot = names.nodename;
  }
  return boot + "/" + namespace_id("/proc/self/ns/net");
}

std::string why_unavailable() {
  try {
    const UniqueFd segment = create_segment(4096);
    SegmentMapper().map(segment, 4096);
    const Listener listener(1);
    const Link link = connect_to(listener.address());
    if (!listener.accept(std::chrono::seconds(1)))
      return "an abstract unix socket does not connect";
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

ShmConnector::ShmConnector(std::shared_ptr<SegmentMapper> mapper) : mapper_(std::move(mapper)) {}

std::string ShmConnector::describe(const Config& /*config*/) {
  listener_ = std::make_unique<Listener>(1024);
  return concat("shm 1 ", host_identity(), " ", listener_->address());
}

std::string ShmConnector::why_not(const std::string& description, const std::string& other) {
  const Description a = parse(description);
  const Description b = parse(other);
  if (a.address.empty() || b.address.empty()) return "a rank offers no shared memory";
  if (a.host != b.host) return concat("different hosts (", a.host, " and ", b.host, ")");
  return "";
}

// The mesh while it grows.
struct ShmConnector::Mesh {
  const ConnectRequest& request;
  UniqueFd my_segment;
  size_t segment_bytes;
  SegmentMapper& mapper;
  std::vector<SharedMapping> segments;
  std::vector<Link> links;

  Mesh(const ConnectRequest& r, SegmentMapper& m)
      : request(r),
        segment_bytes(Layout(r.world_size, r.geometry).bytes()),
        mapper(m),
        segments(static_cast<size_t>(r.world_size)),
        links(static_cast<size_t>(r.world_size)) {
    my_segment = create_segment(segment_bytes);
    auto& mine = segments[static_cast<size_t>(r.rank)];
    mine = mapper.map(my_segment, segment_bytes);
    // The file is zeros, which is the initial state of every flag.
    new (mine->data()) ControlBlock;
  }

  void add(int peer, Link link, const UniqueFd& segment) {
    link.watch_process();
    segments[static_cast<size_t>(peer)] = mapper.map(segment, segment_bytes);
    links[static_cast<size_t>(peer)] = std::move(link);
  }

  Patience patience() const { return {request.deadline, request.interrupt}; }

  Hello my_hello() const { return {request.job_key, request.rank}; }

  std::string missing() const {
    std::string ranks;
    for (int peer = request.rank + 1; peer < request.world_size; ++peer) {
      if (!links[static_cast<size_t>(peer)]) ranks += concat(ranks.empty() ? "" : ", ", peer);
    }
    return ranks;
  }

  void connect_to_lower_ranks() {
    std::vector<Link> pending;
    for (int peer = 0; peer < request.rank; ++peer) {
      try {
        pending.push_back(
            connect_to(parse(request.descriptions[static_cast<size_t>(peer)]).address));
        pending.back().send_hello(my_hello(), my_segment);
      } catch (const Error& error) {
        fail(ErrorKind::peer_failed, "rank ", request.rank, " cannot reach rank ", peer, ": ",
             error.what(),
             ". It seems to have died while the group was connecting, or the store "
             "still holds the keys of an earlier run: use a fresh one");
      }
    }
    for (int peer = 0; peer < request.rank; ++peer) {
      UniqueFd segment;
      std::optional<Hello> hello;
      try {
        hello = pending[static_cast<size_t>(peer)].receive_hello(patience(), segment);
      } catch (const Error& error) {
        fail(error.kind(), "rank ", request.rank, " waited for rank ", peer,
             " to accept its connection: ", error.what());
      }
      if (!hello || hello->job_key != request.job_key || hello->rank != peer || !segment) {
        fail(ErrorKind::peer_failed, "rank ", request.rank, ": rank ", peer,
             " closed the connection while the group was connecting");
      }
      add(peer, std::move(pending[static_cast<size_t>(peer)]), segment);
    }
  }

  // One connection at the listener; strangers are dropped without an answer.
  void accept_one(Link link) {
    UniqueFd segment;
    std::optional<Hello> hello;
    try {
      hello = link.receive_hello({Deadline::after(std::chrono::seconds(1)), nullptr}, segment);
    } catch (const Error&) {
      return;
    }
    if (!hello || hello->job_key != request.job_key || !segment) return;
    if (hello->rank <= request.rank || hello->rank >= request.world_size) return;
    if (links[static_cast<size_t>(hello->rank)]) return;
    try {
      link.send_hello(my_hello(), my_segment);
    } catch (const Error& error) {
      fail(ErrorKind::peer_failed, "rank ", request.rank, " cannot answer rank ", hello->rank, ": ",
           error.what(), ". It seems to have died while the group was connecting");
    }
    add(hello->rank, std::move(link), segment);
  }

  void accept_higher_ranks(const Listener& listener) {
    while (!missing().empty()) {
      if (request.deadline.passed()) {
        fail(ErrorKind::timed_out, "rank ", request.rank, " waited in vain for rank(s) ", missing(),
             " to connect over shared memory");
      }
      if (request.interrupt) request.interrupt();
      auto link = listener.accept(std::chrono::milliseconds(request.deadline.remaining_ms(100)));
      if (link) accept_one(std::move(*link));
    }
  }
};

std::unique_ptr<Transport> ShmConnector::connect(const ConnectRequest& request) {
  Mesh mesh(request, *mapper_);
  mesh.connect_to_lower_ranks();
  mesh.accept_higher_ranks(*listener_);
  listener_.reset();
  return std::make_unique<ShmTransport>(request, std::move(mesh.segments), std::move(mesh.links));
}

}  // namespace pycoll::shm
