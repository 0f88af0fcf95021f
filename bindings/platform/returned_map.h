// A std::map that a function of another C++ library returns, read as it lies in memory.

#pragma once

#include <cstddef>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <utility>

namespace fitter::platform {

// A function writes the map that it returns where its caller has room. Room for the largest, all zero before.
struct map_room {
    void * words[6] = {};
};

template <typename Key, typename Value> class returned_map {
  public:
    using map = std::map<Key, Value>;

    // Of Microsoft's library, in builds for release: the first node, the size.
    static map of_microsoft(map_room & room) {
        auto * head = static_cast<microsoft_node *>(room.words[0]);
        require(head != nullptr && head->is_nil);
        map result = entries(head->parent, [](microsoft_node * node) { return node->is_nil; }, std::free, size_in(room.words[1]));
        std::free(head);
        return result;
    }

    // Of libc++ or libstdc++, whose functions have the same names. The root's parent is within the map in both, at the
    // second word, and an empty map is seen by where it begins.
    static map of_clang_or_gcc(map_room & room) {
        void ** words  = room.words;
        void *  within = words + 1;
        if (auto * root = static_cast<libcxx_node *>(words[1]); root != nullptr ? root->parent == within : words[0] == within) {
            return entries(root, is_null<libcxx_node>, std::free, size_in(words[2]));
        }
        auto * root = static_cast<libstdcxx_node *>(words[2]);
        require(root != nullptr ? root->parent == within : words[3] == within && words[4] == within);
        // Which C library they are of is unknown, so these few bytes stay.
        return entries(root, is_null<libstdcxx_node>, [](void *) {}, size_in(words[5]));
    }

  private:
    struct microsoft_node {
        microsoft_node *            left;
        microsoft_node *            parent;
        microsoft_node *            right;
        char                        colour;
        char                        is_nil;
        std::pair<const Key, Value> entry;
    };
    struct libcxx_node {
        libcxx_node *               left;
        libcxx_node *               right;
        libcxx_node *               parent;
        bool                        is_black;
        std::pair<const Key, Value> entry;
    };
    struct libstdcxx_node {
        int                         colour;
        libstdcxx_node *            parent;
        libstdcxx_node *            left;
        libstdcxx_node *            right;
        std::pair<const Key, Value> entry;
    };

    static void require(bool is_so) {
        if (!is_so) {
            throw std::runtime_error("a std::map of this llama.cpp is laid out in another way");
        }
    }

    static size_t size_in(const void * word) {
        const auto size = reinterpret_cast<size_t>(word);
        require(size <= 4096);
        return size;
    }

    template <typename Node> static bool is_null(Node * node) { return node == nullptr; }

    template <typename Node, typename IsEnd, typename Free> static map entries(Node * root, IsEnd is_end, Free free, size_t size) {
        map result;
        take(root, is_end, free, result);
        require(result.size() == size);
        return result;
    }

    template <typename Node, typename IsEnd, typename Free> static void take(Node * node, IsEnd is_end, Free free, map & result) {
        if (is_end(node)) {
            return;
        }
        take(node->left, is_end, free, result);
        take(node->right, is_end, free, result);
        result.insert(node->entry);
        free(node);
    }
};

}  // namespace fitter::platform
