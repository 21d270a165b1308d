#include "runtime/bootstrap.h"

#include <fcntl.h>

#include <map>
#include <sstream>

#include "core/error.h"
#include "core/fd.h"
#include "core/host.h"
#include "core/random.h"
#include "runtime/slices.h"

namespace pycoll {
namespace {

constexpr std::string_view kProtocol = "4";
constexpr size_t kAllPairs = 256;  // ranks
// Signals are served that often.
constexpr Nanoseconds kLongestSleep = std::chrono::milliseconds(100);
// One question to the store: its wait cannot be interrupted, and a distant one takes its time.
constexpr Nanoseconds kStorePatience = std::chrono::milliseconds(400);

// A record is lines of "name value"; values have no newlines.
using Record = std::map<std::string, std::string>;

std::string write_record(const Record& record) {
  std::string text;
  for (const auto& [name, value] : record) text += name + " " + value + "\n";
  return text;
}

Record read_record(const std::string& text) {
  Record record;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    const size_t space = line.find(' ');
    if (space != std::string::npos) record[line.substr(0, space)] = line.substr(space + 1);
  }
  return record;
}

Record my_record(const BootstrapRequest& request, Connector& connector) {
  Record record;
  record["protocol"] = kProtocol;
  record["world_size"] = std::to_string(request.world_size);
  for (const ConfigVariable& variable : config_variables()) {
    if (variable.agreed) record[std::string(variable.name)] = variable.show(request.config);
  }
  record["PYCOLL_TABLE"] = fingerprint_of(request.table);
  for (const auto& [name, value] : request.agreed) record[name] = value;
  record["host"] = host_identity();
  record["transport"] = connector.describe(request.config);
  if (request.rank == 0) record["job_key"] = random_name();
  return record;
}

std::string key_of(const BootstrapRequest& request, int rank) {
  return concat(request.prefix, "/rank/", rank);
}

// Everything but these must be equal.
bool may_differ(const std::string& name) {
  return name == "transport" || name == "host" || name == "job_key";
}

void check_equal(const Record& first, const Record& record, size_t rank) {
  for (const auto& [name, value] : first) {
    if (may_differ(name)) continue;
    const auto other = record.find(name);
    const std::string theirs = other == record.end() ? "(not there)" : other->second;
    if (theirs != value) {
      fail(ErrorKind::mismatch, name, " differs between ranks: '", value, "' on rank 0, '", theirs,
           "' on rank ", rank, ". It must be the same on every rank");
    }
  }
}

// By who waits, now and then. Records have random names in them: no two are the same. True when
// this rank's own is there.
bool has_own(const BootstrapRequest& request, const std::string& mine) {
  const auto found = request.store->peek(key_of(request, request.rank));
  if (!found || *found == mine) return found.has_value();
  fail(
      ErrorKind::mismatch, "rank ", request.rank, " of ", request.world_size,
      ": another process has joined the group as this rank. Every process needs a rank of its own, "
      "and each group a store or a prefix of its own");
}

std::vector<Record> collect(const BootstrapRequest& request, const std::string& mine,
                            const Deadline& deadline) {
  std::vector<Record> records;
  for (int rank = 0; rank < request.world_size; ++rank) {
    std::optional<std::string> text;
    do {
      if (request.interrupt) request.interrupt();
      const Nanoseconds patience = std::min<Nanoseconds>(deadline.remaining(), kStorePatience);
      text = request.store->get(key_of(request, rank), patience);
      // Another of that name may have come about and tidied up, or the store forgets.
      if (!text && !has_own(request, mine)) request.store->set(key_of(request, request.rank), mine);
    } while (!text && !deadline.passed());
    if (!text) {
      fail(ErrorKind::timed_out, "rank ", request.rank, " of ", request.world_size, " waited ",
           request.config.connect_timeout, " s for rank ", rank,
           " to join the group. Is that process running, does it use the same store and world "
           "size, and call new_group() or shrink_group() in the same order with the same ranks? "
           "(PYCOLL_CONNECT_TIMEOUT sets the limit)");
    }
    records.push_back(read_record(*text));
    // At once: with a wrong world size the next rank may never come.
    check_equal(records.front(), records.back(), records.size() - 1);
  }
  return records;
}

// Every rank looks at every pair, so all find the same pair that does not fit, and none waits for
// one that found it alone. In a huge group each looks at its own pairs.
void check_viable(const Agreement& agreement, Connector& connector, int own_rank) {
  const auto& all = agreement.descriptions;
  const auto own = static_cast<size_t>(own_rank);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (size_t peer = rank + 1; peer < all.size(); ++peer) {
      if (all.size() > kAllPairs && rank != own && peer != own) continue;
      const std::string reason = connector.why_not(all[rank], all[peer]);
      if (reason.empty()) continue;
      fail(ErrorKind::peer_failed, "no transport connects rank ", rank, " and rank ", peer, ": ",
           reason);
    }
  }
}

std::vector<int32_t> number_hosts(std::vector<Record>& records) {
  std::map<std::string, int32_t> known;
  std::vector<int32_t> hosts;
  for (Record& record : records) {
    hosts.push_back(
        known.emplace(record["host"], static_cast<int32_t>(known.size())).first->second);
  }
  return hosts;
}

// A rank that gives up waiting takes its record with it: the next run in the same store would be
// led to a dead address. A rank that found a mismatch leaves it, so that the others find it too.
void forget(const BootstrapRequest& request) {
  try {
    request.store->remove(key_of(request, request.rank));
  } catch (const std::exception&) {
    // The store has gone too; why the group was given up is the thing to tell.
  }
}

// What a rank has done when it says so to its peers.
enum class Stage : int { connected = 1, forgotten = 2 };

// Why a peer will never come to `stage`; empty while it may.
std::string why_not_coming(Transport& transport, int peer, Stage stage) {
  if (const auto reason = transport.peer_abort()) return *reason;
  const PeerState state = transport.peer_state(peer);
  // What it said last is looked at after its death: it may have come there first.
  if (state == PeerState::alive || transport.ready_stage(peer) >= static_cast<int>(stage))
    return "";
  return concat("rank ", peer, state == PeerState::died ? " died" : " left",
                " while the group was connecting");
}

// Returns when every rank has come to `stage`.
void meet(Transport& transport, const BootstrapRequest& request, Stage stage,
          const Deadline& deadline) {
  transport.say_ready(static_cast<int>(stage));
  for (int peer = 0; peer < request.world_size; ++peer) {
    const auto there = [&] {
      return peer == request.rank || transport.ready_stage(peer) >= static_cast<int>(stage);
    };
    while (!there()) {
      if (request.interrupt) request.interrupt();
      const std::string trouble = why_not_coming(transport, peer, stage);
      if (!trouble.empty()) {
        fail(ErrorKind::peer_failed, "rank ", request.rank, " cannot join the group: ", trouble);
      }
      if (deadline.passed()) {
        fail(ErrorKind::timed_out, "rank ", request.rank, " of ", request.world_size, " waited ",
             request.config.connect_timeout, " s for rank ", peer,
             " to connect to all ranks (PYCOLL_CONNECT_TIMEOUT sets the limit)");
      }
      transport.prepare_sleep();
      if (there()) {
        transport.cancel_sleep();
      } else {
        transport.sleep(std::min<Nanoseconds>(deadline.remaining(), kLongestSleep));
      }
    }
  }
}

// A rank that gives up while it connects cannot tell those that it has not reached, so it leaves a
// note in the store. The job key is new with every attempt: a note of an earlier one is never read.
//
// A store may need a descriptor for that, and the want of descriptors is a common reason to give
// up: one is kept back from the start.
class Farewell {
 public:
  explicit Farewell(const BootstrapRequest& request)
      : request_(request), spare_(::open("/dev/null", O_RDONLY | O_CLOEXEC)) {}

  void use(const Agreement& agreement) {
    key_ = concat(request_.prefix, "/gave_up/", agreement.job_key);
    own_record_ = agreement.own_record;
  }

  void leave(const std::string& reason) {
    spare_.reset();
    try {
      request_.store->set(key_, concat("rank ", request_.rank,
                                       " gave up while the group was connecting: ", reason));
    } catch (const std::exception&) {
      // Why this rank gave up is the thing to tell here; the others have their deadline.
    }
  }

  // Throws when a rank has left one. Looks at the store once a second.
  void look() {
    if (Clock::now() < next_look_) return;
    next_look_ = Clock::now() + std::chrono::seconds(1);
    if (const auto note = read()) throw Error(ErrorKind::peer_failed, *note);
    has_own(request_, own_record_);
  }

  // For a rank that cannot reach a peer: throws what a peer has left, if it can be read.
  void explain() const {
    std::optional<std::string> note;
    try {
      note = read();
    } catch (const std::exception&) {
      // The error at hand is the one to tell.
    }
    if (note) throw Error(ErrorKind::peer_failed, *note);
  }

 private:
  std::optional<std::string> read() const {
    const auto note = request_.store->peek(key_);
    if (!note) return std::nullopt;
    return concat("rank ", request_.rank, " cannot join the group: ", *note);
  }

  const BootstrapRequest& request_;
  UniqueFd spare_;
  std::string key_;
  std::string own_record_;
  Clock::time_point next_look_ = Clock::now() + std::chrono::seconds(1);
};

std::unique_ptr<Transport> connect_all(const BootstrapRequest& request, Connector& connector,
                                       ConnectRequest connect, Farewell& farewell) {
  connect.interrupt = [&] {
    if (request.interrupt) request.interrupt();
    farewell.look();
  };
  try {
    return connector.connect(connect);
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const Error*>(&error);
    if (known != nullptr && known->kind() == ErrorKind::peer_failed) farewell.explain();
    farewell.leave(error.what());
    throw;
  }
}

}  // namespace

Agreement agree(const BootstrapRequest& request, Connector& connector, const Deadline& deadline) {
  const std::string mine = write_record(my_record(request, connector));
  request.store->set(key_of(request, request.rank), mine);
  std::vector<Record> records = collect(request, mine, deadline);
  Agreement agreement;
  agreement.own_record = mine;
  agreement.job_key = records[0]["job_key"];
  for (Record& record : records) agreement.descriptions.push_back(record["transport"]);
  agreement.hosts = number_hosts(records);
  check_viable(agreement, connector, request.rank);
  return agreement;
}

std::unique_ptr<Transport> bootstrap(const BootstrapRequest& request, Connector& connector,
                                     Agreement& agreement) {
  const auto timeout = std::chrono::duration<double>(request.config.connect_timeout);
  const Deadline deadline = Deadline::after(std::chrono::duration_cast<Nanoseconds>(timeout));
  Farewell farewell(request);
  try {
    agreement = agree(request, connector, deadline);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::timed_out) forget(request);
    throw;
  } catch (...) {
    forget(request);  // interrupted
    throw;
  }

  farewell.use(agreement);
  ConnectRequest connect;
  connect.rank = request.rank;
  connect.world_size = request.world_size;
  connect.job_key = agreement.job_key;
  connect.descriptions = agreement.descriptions;
  connect.serves.assign(connect.descriptions.size(), true);
  connect.serves[static_cast<size_t>(request.rank)] = false;
  connect.geometry = {slot_for(request.config.slot_bytes),
                      static_cast<uint32_t>(request.config.fifo_depth),
                      request.config.window_bytes};
  connect.deadline = deadline;
  std::unique_ptr<Transport> transport =
      connect_all(request, connector, std::move(connect), farewell);
  try {
    meet(*transport, request, Stage::connected, deadline);
    // By now every rank has read every record, and no rank returns before all records are gone: the
    // name can be used again at once.
    request.store->remove(key_of(request, request.rank));
    meet(*transport, request, Stage::forgotten, deadline);
  } catch (const std::exception& error) {
    transport->send_abort(
        concat("rank ", request.rank, " gave up while the group was connecting: ", error.what()));
    throw;
  }
  return transport;
}

}  // namespace pycoll
