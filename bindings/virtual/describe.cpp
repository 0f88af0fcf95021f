#include "virtual/describe.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <stdexcept>

namespace fitter {

namespace {

std::vector<const profile *> profiles() {
    std::vector<const profile *> all = {&cuda_profile, &rocm_profile};
    for (const profile & driver : vulkan_profiles()) {
        all.push_back(&driver);
    }
    all.push_back(&metal_profile);
    return all;
}

std::vector<std::string> split(const std::string & text, char separator, size_t max_parts) {
    std::vector<std::string> parts;
    size_t                   start = 0;
    while (parts.size() + 1 < max_parts) {
        const size_t end = text.find(separator, start);
        if (end == std::string::npos) {
            break;
        }
        parts.push_back(text.substr(start, end - start));
        start = end + 1;
    }
    parts.push_back(text.substr(start));
    return parts;
}

template <typename Number>
Number parse_number(const std::string & text, const char * field) {
    Number       value{};
    const char * end    = text.data() + text.size();
    const auto   result = std::from_chars(text.data(), end, value);
    if (result.ec != std::errc() || result.ptr != end || value < Number{}) {
        throw std::invalid_argument(std::string(field) + " '" + text + "' is not a whole number");
    }
    return value;
}

const profile * find_profile(const std::string & name) {
    std::string known;
    for (const profile * candidate : profiles()) {
        if (name == candidate->name) {
            return candidate;
        }
        known += known.empty() ? candidate->name : std::string(", ") + candidate->name;
    }
    throw std::invalid_argument("unknown profile '" + name + "' (known: " + known + ")");
}

void check_name(const std::string & name) {
    if (name.empty() || name.size() > 60) {
        throw std::invalid_argument("the name must have 1 to 60 characters");
    }
    for (const char c : name) {
        if (!std::isalnum(static_cast<unsigned char>(c)) && std::string("_-.:[]").find(c) == std::string::npos) {
            throw std::invalid_argument("the name '" + name + "' may hold letters, digits and _-.:[] only");
        }
    }
    if (name == "CPU") {
        throw std::invalid_argument("the name 'CPU' is taken by the host");
    }
}

description parse_description(const std::string & text) {
    const std::vector<std::string> fields = split(text, ',', 6);
    if (fields.size() < 6) {
        throw std::invalid_argument("'" + text + "' has " + std::to_string(fields.size()) +
                                    " fields instead of name,profile,compute_capability,total_bytes,free_bytes,description");
    }
    description device;
    device.name = fields[0];
    check_name(device.name);
    device.profile            = find_profile(fields[1]);
    device.compute_capability = parse_number<int>(fields[2], "the compute capability");
    device.total              = parse_number<size_t>(fields[3], "the total memory");
    device.free               = parse_number<size_t>(fields[4], "the free memory");
    device.text               = fields[5];
    if (device.free > device.total) {
        throw std::invalid_argument("more memory is free (" + fields[4] + ") than there is (" + fields[3] + ")");
    }
    return device;
}

}  // namespace

std::vector<description> parse_descriptions(const std::string & text) {
    std::vector<description> devices;
    for (const std::string & part : split(text, ';', text.size() + 1)) {
        if (part.find_first_not_of(" \t\n") == std::string::npos) {
            continue;
        }
        const std::string where = "device " + std::to_string(devices.size() + 1) + ": ";
        if (devices.size() == max_devices) {
            throw std::invalid_argument("more than " + std::to_string(max_devices) + " devices");
        }
        try {
            devices.push_back(parse_description(part));
        } catch (const std::invalid_argument & error) {
            throw std::invalid_argument(where + error.what());
        }
        for (size_t i = 0; i + 1 < devices.size(); i++) {
            if (devices[i].name == devices.back().name) {
                throw std::invalid_argument(where + "the name '" + devices.back().name + "' is used twice");
            }
        }
    }
    for (description & device : devices) {
        device.n_alike = static_cast<size_t>(std::count_if(devices.begin(), devices.end(), [&](const description & other) {
            return other.profile == device.profile;
        }));
    }
    return devices;
}

}  // namespace fitter
