// A named check that the driver can run. Scenarios repeat small episodes until their time is up and
// throw CheckFailed when something is wrong.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "world.h"

namespace pycoll::stress {

struct Scenario {
  std::string name;
  std::string summary;
  std::function<void(const Settings&)> run;
};

std::vector<Scenario> transport_scenarios();
std::vector<Scenario> arena_scenarios();
std::vector<Scenario> network_scenarios();
std::vector<Scenario> tcp_scenarios();
std::vector<Scenario> collective_scenarios();  // one for each algorithm there is, and mixtures
std::vector<Scenario> failure_scenarios();
std::vector<Scenario> message_scenarios();
std::vector<Scenario> at_once_scenarios();
std::vector<Scenario> codec_scenarios();

// Calls episode(options) for world sizes 2, 3, 4, 2, ... at least once each, then until the time is
// up. Every second round of them goes to sleep as soon as it can.
void run_episodes(const Settings& settings,
                  const std::function<void(const WorldOptions&)>& episode);

// Waits by the sleep protocol of transport.h; throws CheckFailed when patience is at an end.
void wait_on(Transport& transport, Nanoseconds patience, const std::function<bool()>& ready);

}  // namespace pycoll::stress
