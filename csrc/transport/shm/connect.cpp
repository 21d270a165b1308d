// How ranks of one host get to share memory: each makes a segment, and the processes' connections
// carry it to the peers.
#include <fcntl.h>

#include <new>
#include <sstream>

#include "core/error.h"
#include "core/host.h"
#include "transport/shm/shm_transport.h"

namespace pycoll::shm {
namespace {

// "shm 3 <host> <id> <key> <socket>"
struct Description {
  std::string host;
  Address address;
};

std::string write(const Description& description) {
  const Address& at = description.address;
  return concat("shm 3 ", description.host, " ", at.id, " ", at.key, " ", at.socket);
}

std::optional<Description> parse(const std::string& text) {
  std::istringstream in(text);
  std::string tag;
  std::string version;
  Description description;
  Address& at = description.address;
  in >> tag >> version >> description.host >> at.id >> at.key >> at.socket;
  if (!in || tag != "shm" || version != "3") return std::nullopt;
  return description;
}

std::vector<Address> addresses(const ConnectRequest& request) {
  std::vector<Address> peers(static_cast<size_t>(request.world_size));
  for (size_t peer = 0; peer < peers.size(); ++peer) {
    if (!request.serves[peer]) continue;
    const auto description = parse(request.descriptions[peer]);
    if (!description) fail(ErrorKind::mismatch, "rank ", peer, " offers no shared memory");
    peers[peer] = description->address;
  }
  return peers;
}

std::string gave_up(const ConnectRequest& request, const std::exception& error) {
  return concat("rank ", request.rank, " gave up while the group was connecting: ", error.what());
}

}  // namespace

ShmConnector::ShmConnector(std::shared_ptr<SegmentMapper> mapper) : mapper_(std::move(mapper)) {}
ShmConnector::~ShmConnector() = default;

std::shared_ptr<Endpoints> ShmConnector::endpoints() {
  const std::lock_guard lock(setup_);
  if (endpoints_ == nullptr) {
    // A seccomp filter may refuse what the transport needs: peers should hear of it before they
    // count on it.
    SegmentMapper().map(create_segment(4096), 4096);
    endpoints_ = std::make_shared<Endpoints>();
  }
  return endpoints_;
}

std::string ShmConnector::describe(const Config& /*config*/) {
  return write({host_identity(), endpoints()->address()});
}

std::string ShmConnector::why_not(const std::string& description, const std::string& other) {
  const auto a = parse(description);
  const auto b = parse(other);
  if (!a || !b) return "a rank offers no shared memory, or that of another version of pycoll";
  if (a->host != b->host) {
    return concat("different hosts, or different namespaces of one (", a->host, " and ", b->host,
                  ")");
  }
  return "";
}

std::unique_ptr<Transport> ShmConnector::connect(const ConnectRequest& request) {
  try {
    return meet(request);
  } catch (const std::exception& error) {
    // Peers may have opened the group here before there was a port to tell them anything.
    endpoints()->refuse(request.job_key, gave_up(request, error));
    throw;
  }
}

std::unique_ptr<Transport> ShmConnector::meet(const ConnectRequest& request) {
  const size_t bytes = Layout(request.world_size, request.geometry).bytes();
  std::vector<SharedMapping> segments(static_cast<size_t>(request.world_size));
  ShmLeases::Parts leases{process_arena(), {}, process_quarantine()};
  // A forked child has its parent's, and no memory that others may see: what it moves is staged.
  if (leases.own && leases.own->fd() < 0) leases.own = nullptr;
  leases.peers.resize(segments.size());
  leases.quarantine.sweep();
  UniqueFd segment = create_segment(bytes);
  SharedMapping& mine = segments[static_cast<size_t>(request.rank)];
  mine = mapper_->map(segment, bytes);
  // The file is zeros, which is the initial state of every flag.
  new (mine->data()) ControlBlock;

  Attachments memory{std::move(segment), UniqueFd()};
  // A copy: the arena keeps its own.
  if (leases.own) {
    memory.arena = UniqueFd(::fcntl(leases.own->fd(), F_DUPFD_CLOEXEC, 0));
    if (!memory.arena) fail(ErrorKind::system, errno_text("a copy of the arena's descriptor"));
  }
  auto port = std::make_unique<Port>(endpoints(), request, addresses(request), std::move(memory));
  try {
    port->open([&](int peer, const Attachments& theirs) {
      segments[static_cast<size_t>(peer)] = mapper_->map(theirs.segment, bytes);
      if (!theirs.arena) return;
      leases.peers[static_cast<size_t>(peer)] = arenas_.map(theirs.arena, leases.own);
    });
  } catch (const std::exception& error) {
    port->send_abort(gave_up(request, error));
    throw;
  }
  return std::make_unique<ShmTransport>(request, std::move(segments), std::move(port),
                                        std::move(leases));
}

// The setup lock too: no descriptor is half way into the table while the process forks.
void ShmConnector::before_fork() {
  setup_.lock();
  if (endpoints_) endpoints_->before_fork();
}

void ShmConnector::after_fork_parent() {
  if (endpoints_) endpoints_->after_fork_parent();
  setup_.unlock();
}

void ShmConnector::after_fork_child() {
  if (endpoints_) endpoints_->after_fork_child();
  setup_.unlock();
}

}  // namespace pycoll::shm
