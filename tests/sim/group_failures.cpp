// Groups that end: what ranks are told, and how soon.
#include "group_failures.h"

#include <csignal>
#include <cstdio>
#include <thread>

namespace pycoll::sim::tests {

Error error_of(GroupRank& rank) {
  const Deadline deadline = Deadline::after(kSoon);
  while (!deadline.passed()) {
    try {
      rank.group->check();
    } catch (const Error& error) {
      return error;
    }
    ::usleep(1000);
  }
  throw std::runtime_error("no error in time");
}

void check_names(int victim, const std::string& said) {
  const bool names = said.find("rank " + std::to_string(victim)) != std::string::npos;
  check(names, "the error does not name rank " + std::to_string(victim) + ": " + said);
}

void check_dead(GroupRank& rank, FailureCall& call, const std::string& said) {
  const Deadline deadline = Deadline::after(kSoon);
  while (cudaStreamQuery(call.stream.get()) == cudaErrorNotReady) {
    check(!deadline.passed(), "a stream of a dead group still waits");
    ::usleep(1000);
  }
  try {
    rank.group->enqueue(call.request, call.stream.get());
  } catch (const Error& error) {
    check(error.what() == said, std::string("a dead group says ") + error.what());
    return;
  }
  throw std::runtime_error("a dead group took a call");
}

void killed_suite(const GroupSettings& settings) {
  const int victim = settings.ranks - 1;
  const auto body = [&](GroupRank& rank) {
    FailureCall call;
    rank.group->enqueue(call.request, call.stream.get());
    if (cudaStreamSynchronize(call.stream.get()) != cudaSuccess) throw std::runtime_error("sync");
    rank.group->check();
    rank.meeting.barrier();
    if (rank.rank == victim) ::raise(SIGKILL);
    std::string said;
    try {
      rank.group->enqueue(call.request, call.stream.get());
      said = error_of(rank).what();
    } catch (const Error& error) {
      said = error.what();
    }
    // Whoever hears of it second may hear of the first to give up; one at least knows the victim.
    check_names(victim, said);
    check_dead(rank, call, said);
  };
  run_group(settings, body, [&](int rank) { return rank == victim ? SIGKILL : 0; });
}

// Calls follow each other, and the victim goes after some time, which each case draws.
void killed_amid_suite(const GroupSettings& settings) {
  const int victim = settings.ranks - 1;
  const auto body = [&](GroupRank& rank) {
    FailureCall call(60000);
    rank.group->enqueue(call.request, call.stream.get());
    if (cudaStreamSynchronize(call.stream.get()) != cudaSuccess) throw std::runtime_error("sync");
    rank.meeting.barrier();
    std::thread killer;
    if (rank.rank == victim) {
      killer = std::thread([&] {
        ::usleep(static_cast<useconds_t>(rank.seed * 7919 % 20000));
        ::raise(SIGKILL);
      });
    }
    std::string said;
    const Deadline deadline = Deadline::after(kSoon);
    while (said.empty()) {
      check(!deadline.passed(), "no error in time");
      try {
        rank.group->enqueue(call.request, call.stream.get());
        while (cudaStreamQuery(call.stream.get()) == cudaErrorNotReady) rank.group->check();
        rank.group->check();
      } catch (const Error& error) {
        said = error.what();
      }
    }
    check_names(victim, said);
    check_dead(rank, call, said);
  };
  run_group(settings, body, [&](int rank) { return rank == victim ? SIGKILL : 0; });
}

// The last rank does not come while the others wait.
void late_suite(const GroupSettings& settings) {
  run_group(settings, [&](GroupRank& rank) {
    FailureCall call;
    rank.group->enqueue(call.request, call.stream.get());
    if (cudaStreamSynchronize(call.stream.get()) != cudaSuccess) throw std::runtime_error("sync");
    rank.meeting.barrier();
    call.request.timeout = std::chrono::milliseconds(500);
    if (rank.rank != settings.ranks - 1) {
      try {
        rank.group->enqueue(call.request, call.stream.get());
      } catch (const Error&) {
        // One that has heard of the end already.
      }
    }
    const std::string said = error_of(rank).what();
    check(said.find("ime") != std::string::npos, "it does not say that time is over: " + said);
    check_dead(rank, call, said);
    rank.meeting.barrier();
  });
}

void abort_suite(const GroupSettings& settings) {
  run_group(settings, [](GroupRank& rank) {
    FailureCall call;
    rank.meeting.barrier();
    if (rank.rank == 0) {
      rank.group->abort("enough");
    } else {
      try {
        rank.group->enqueue(call.request, call.stream.get());
      } catch (const Error&) {
      }
    }
    const std::string said = error_of(rank).what();
    check(said.find("rank 0") != std::string::npos, "it does not name rank 0: " + said);
    check_dead(rank, call, said);
    rank.meeting.barrier();
  });
}

// An error that is found before anything is queued leaves the group as it was.
void refused_suite(const GroupSettings& settings) {
  run_group(settings, [](GroupRank& rank) {
    FailureCall call;
    CallRequest wrong = call.request;
    wrong.root = rank.ranks;
    const auto refuses = [&](const auto& body, ErrorKind kind) {
      try {
        body();
      } catch (const Error& error) {
        check(error.kind() == kind, std::string("another kind: ") + error.what());
        return;
      }
      throw std::runtime_error("it was not refused");
    };
    refuses([&] { rank.group->enqueue(wrong, call.stream.get()); }, ErrorKind::invalid_argument);
    MessageRequest to_self;
    to_self.peer = rank.rank;
    const std::vector<MessageRequest> batch{to_self};
    refuses([&] { rank.group->enqueue(batch, call.stream.get()); }, ErrorKind::invalid_argument);
    MessageRequest from_any;
    from_any.receives = true;
    from_any.peer = kAnySource;
    const std::vector<MessageRequest> any{from_any};
    refuses([&] { rank.group->enqueue(any, call.stream.get()); }, ErrorKind::not_implemented);
    rank.group->enqueue(call.request, call.stream.get());
    check(cudaStreamSynchronize(call.stream.get()) == cudaSuccess, "the group is broken");
    rank.group->check();
  });
}

}  // namespace pycoll::sim::tests
