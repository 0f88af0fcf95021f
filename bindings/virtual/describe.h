// The text that describes virtual devices: one after another separated by ';', each with the fields
// name,profile,compute_capability,total_bytes,free_bytes,description (the last one may hold commas).

#pragma once

#include <string>
#include <vector>

#include "virtual/profile.h"

namespace fitter {

constexpr size_t max_devices = 16;

// Throws std::invalid_argument with one line that names what is wrong.
std::vector<description> parse_descriptions(const std::string & text);

}  // namespace fitter
