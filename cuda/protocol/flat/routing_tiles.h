// Source's half of routing for many lanes, before dispatch announces: the lists of routing.h, built by tiles of tokens
// that blocks share.
//
// The tokens of a tile that visit an expert form a bit set, so a token's place among them is the number of bits before
// its own: stable in whatever order lanes set them. The number of copies of a token for a rank is a binary number, and
// each of its digits is a bit set as well. Each block counts the tokens before and after its own tiles itself, in one
// pass for all destinations, and waits for no other block.
#pragma once

#include "../core/coop.h"
#include "../core/dims.h"
#include "../core/plan.h"
#include "../two_level/node_slots.h"
#include "entries.h"

namespace moe_rt {

// Returns the bits of a set's word that belong to tokens before `end`.
MOE_RT_FN uint32_t bits_before(uint32_t bits, int32_t word, int32_t end) {
  const int32_t rest = end - 32 * word;
  return rest >= 32 ? bits : bits & ((1u << rest) - 1);
}

// Scratch memory shared by the lanes that route a tile.
struct Tiles {
  int32_t tokens, words, digits;    // tokens of a tile; words of a bit set; digits of a copy count
  int32_t *decoded, *entries;       // [tokens][K] entries (entries.h) without and with flags
  uint32_t* visits;                 // [E][words] set of the tokens that visit the expert
  uint32_t* copies_to;              // [R][words][digits] number of copies of each token for the rank
  int32_t *rows, *later_rows;       // [E] rows of the tokens before the tile, and after it
  int32_t *pulls, *copies;          // [R] of the tokens before the tile; from find_places on, places in the lists
  int32_t *all_pulls, *all_copies;  // [R] of the tokens after the tile; from sum_up on, of all tokens

  MOE_RT_FN static int32_t words_of(int32_t tokens) { return (tokens + 31) / 32; }
  MOE_RT_FN static int32_t digits_of(int32_t value) {
    int32_t digits = 0;
    for (; value > 0; value /= 2) ++digits;
    return digits;
  }
  // Number of ints that route() zeroes; they come first.
  MOE_RT_FN static int64_t num_cleared(const Shape& s, int32_t tokens) {
    const int64_t words = words_of(tokens);
    return s.num_experts * (words + 2) + s.num_ranks * (words * digits_of(s.num_topk) + 4);
  }
  MOE_RT_FN static int64_t num_ints(const Shape& s, int32_t tokens) {
    return num_cleared(s, tokens) + int64_t{2} * tokens * s.num_topk;
  }
  // Number of tiles: at least 1, also without tokens.
  MOE_RT_FN static int64_t count(int64_t num_tokens, int32_t tokens) {
    return num_tokens > tokens ? (num_tokens + tokens - 1) / tokens : 1;
  }
  MOE_RT_FN static Tiles view(int32_t* ints, const Shape& s, int32_t tokens) {
    Tiles t{};
    t.tokens = tokens, t.words = words_of(tokens), t.digits = digits_of(s.num_topk);
    t.visits = reinterpret_cast<uint32_t*>(ints);
    t.copies_to = t.visits + int64_t{s.num_experts} * t.words;
    t.rows = ints + int64_t{s.num_experts} * t.words + int64_t{s.num_ranks} * t.words * t.digits;
    t.later_rows = t.rows + s.num_experts;
    t.pulls = t.later_rows + s.num_experts;
    t.copies = t.pulls + s.num_ranks;
    t.all_pulls = t.copies + s.num_ranks;
    t.all_copies = t.all_pulls + s.num_ranks;
    t.decoded = t.all_copies + s.num_ranks;
    t.entries = t.decoded + int64_t{tokens} * s.num_topk;
    return t;
  }

  MOE_RT_FN int32_t visits_before(int32_t place, int32_t end) const {
    int32_t n = 0;
    for (int32_t word = 0; 32 * word < end; ++word) n += popcount(bits_before(visits[place * words + word], word, end));
    return n;
  }
  struct Sent {
    int32_t pulls, copies;
  };
  // Pulls and copies of the tile's tokens before `end` for the rank.
  MOE_RT_FN Sent sent_before(int32_t rank, int32_t end) const {
    Sent sent{};
    for (int32_t word = 0; 32 * word < end; ++word) {
      uint32_t any = 0;
      for (int32_t digit = 0; digit < digits; ++digit) {
        const uint32_t bits = bits_before(copies_to[(rank * words + word) * digits + digit], word, end);
        any |= bits;
        sent.copies += popcount(bits) << digit;
      }
      sent.pulls += popcount(any);
    }
    return sent;
  }
};

// `ListsFor` is pushing.h's, or has its interface; `Slots` is a SlotRule.
template <class Coop, class Dims, class Weight, class ListsFor, class Slots>
struct TileRouter {
  Coop coop;
  const Dims& dims;
  const World& w;
  const RoutingTables& tables;
  const ExpertIds& topk_idx;
  const Weight* topk_weights;
  int64_t num_tokens;
  Tiles tiles;
  ListsFor lists_for;
  int32_t* send_plan;
  Slots slots;
  int64_t& bad_entry;  // lowest index of an entry with a bad expert id; it counts as none

  // Builds the index-th of `count` shares of the lists, which are built at the same time. Lanes do not sync at the end:
  // callers sync before they announce.
  //
  // Each of the share's tiles is marked (entries and bit sets), written and passed. Before the first is written, all
  // tokens outside of it are counted (count_others), added up for each rank (sum_up) and turned into places
  // (find_places). The last share writes the number of rows of each expert.
  MOE_RT_FN void route(int index, int count) const {
    const Range mine = contiguous_chunk(Tiles::count(num_tokens, tiles.tokens), index, count);
    const Range cleared = strided(coop, Tiles::num_cleared(w.shape, tiles.tokens));
    for (int64_t i = cleared.begin; i < cleared.end; i += cleared.step) tiles.visits[i] = 0;
    for (int64_t tile = mine.begin; tile < mine.end; ++tile) {
      const int64_t start = tile * tiles.tokens, end = min_of(start + tiles.tokens, num_tokens);
      const auto in_tile = int32_t(end - start);
      mark(start, in_tile);
      if (tile == mine.begin) {
        count_others(start, end);
        coop.sync();
        sum_up();
        coop.sync();
        find_places(index == 0);
      }
      coop.sync();
      write(start, in_tile);
      if (tile + 1 == mine.end) break;
      coop.sync();
      pass_tile();
      coop.sync();
    }
    if (index + 1 < count) return;
    const Range experts = strided(coop, w.shape.num_experts);
    for (int64_t i = experts.begin; i < experts.end; i += experts.step) {
      const int32_t entry = tables.entries[i], place = place_of(entry);
      lists_for(owner_of(entry)).counts.put(place, tiles.rows[place] + tiles.visits_before(place, tiles.tokens));
    }
  }

 private:
  MOE_RT_FN int32_t decode(int64_t at) const {
    const int64_t expert = topk_idx[at];
    if (expert < -1 || expert >= w.shape.num_experts) fetch_min_relaxed(bad_entry, at);
    return tables.entry(expert);
  }

  // Calls fn(i, token, k) for each of this lane's entries of the tile: entry i is the k-th of `token`.
  template <class Fn>
  MOE_RT_FN void each_entry(int32_t in_tile, Fn&& fn) const {
    const int num_topk = dims.num_topk();
    for (int32_t i = coop.rank(); i < in_tile * num_topk; i += coop.size()) fn(i, i / num_topk, i % num_topk);
  }

  // Flags each entry of the tile and sets the bits of its token. Lanes sync neither before nor after.
  MOE_RT_FN void mark(int64_t start, int32_t in_tile) const {
    const int num_topk = dims.num_topk();
    each_entry(in_tile, [&](int32_t i, int32_t, int32_t) { tiles.decoded[i] = decode(start * num_topk + i); });
    coop.sync();
    each_entry(in_tile, [&](int32_t i, int32_t token, int32_t k) {
      const int32_t entry = flagged<Dims>(tiles.decoded + token * num_topk, k, num_topk);
      tiles.entries[i] = entry;
      if (entry < 0 || has(entry, kRepeats)) return;
      fetch_or_relaxed(tiles.visits[place_of(entry) * tiles.words + token / 32], 1u << token % 32);
    });
    coop.sync();
    each_entry(in_tile, [&](int32_t i, int32_t token, int32_t) {
      const int32_t entry = tiles.entries[i];
      if (has(entry, kLeads)) mark_copies(owner_of(entry), token);
    });
  }

  // Sets the digits of the number of copies of a token for a rank that it visits.
  MOE_RT_FN void mark_copies(int32_t rank, int32_t token) const {
    int32_t num_copies = 0;
    for_topk<Dims>(dims.num_topk(), [&](int j) {
      const int32_t entry = tiles.entries[token * dims.num_topk() + j];
      num_copies += owner_of(entry) == rank && !has(entry, kRepeats);
    });
    for (int32_t digit = 0; digit < tiles.digits; ++digit) {
      if ((num_copies >> digit & 1) == 0) continue;
      const int32_t word = rank * tiles.words + token / 32;
      fetch_or_relaxed(tiles.copies_to[word * tiles.digits + digit], 1u << token % 32);
    }
  }

  // Counts the tokens outside [begin, end), one token per lane: the rows of each expert, and the pulls of each rank. A
  // count for each rank would be enough for tokens after, but lanes would wait for each other to add to it.
  MOE_RT_FN void count_others(int64_t begin, int64_t end) const {
    const int num_topk = dims.num_topk();
    const Range others = strided(coop, num_tokens - (end - begin));
    for (int64_t i = others.begin; i < others.end; i += others.step) {
      const bool before = i < begin;
      const int64_t first = (before ? i : i + (end - begin)) * num_topk;
      int32_t token[Dims::kTopkBound];
      for_topk<Dims>(num_topk, [&](int k) { token[k] = decode(first + k); });
      for_topk<Dims>(num_topk, [&](int k) {
        const int32_t entry = flagged<Dims>(token, k, num_topk), rank = owner_of(entry);
        if (entry < 0 || has(entry, kRepeats)) return;
        fetch_add_relaxed((before ? tiles.rows : tiles.later_rows)[place_of(entry)], 1);
        if (has(entry, kLeads)) fetch_add_relaxed(before ? tiles.pulls[rank] : tiles.all_pulls[rank], 1);
      });
    }
  }

  // Completes the counts of each rank.
  MOE_RT_FN void sum_up() const {
    const Range experts = strided(coop, w.shape.num_experts), ranks = strided(coop, w.shape.num_ranks);
    for (int64_t i = experts.begin; i < experts.end; i += experts.step) {
      const int32_t before = tiles.rows[i], others = before + tiles.later_rows[i];
      if (others == 0) continue;
      if (before != 0) fetch_add_relaxed(tiles.copies[w.placement.owner[i]], before);
      fetch_add_relaxed(tiles.all_copies[w.placement.owner[i]], others);
    }
    for (int64_t r = ranks.begin; r < ranks.end; r += ranks.step) {
      const Tiles::Sent sent = tiles.sent_before(int32_t(r), tiles.tokens);
      tiles.all_pulls[r] += tiles.pulls[r] + sent.pulls;
      fetch_add_relaxed(tiles.all_copies[r], sent.copies);
    }
  }

  // Adds to each rank's running counts the start of its part of the lists: the sum over all lower ranks. The first share
  // also writes these offsets for the readers.
  MOE_RT_FN void find_places(bool write_offsets) const {
    const Range ends = strided(coop, w.shape.num_ranks + 1);
    for (int64_t r = ends.begin; r < ends.end; r += ends.step) {
      int32_t pulls = 0, copies = 0;
      for (int32_t s = 0; s < r; ++s) pulls += tiles.all_pulls[s], copies += tiles.all_copies[s];
      for (int32_t reader = 0; write_offsets && reader < lists_for.count(); ++reader) {
        const auto lists = lists_for(reader);
        lists.pull_offs.put(r, pulls), lists.copy_offs.put(r, copies);
      }
      if (r < w.shape.num_ranks) tiles.pulls[r] += pulls, tiles.copies[r] += copies;
    }
  }

  // Writes the tile: send_plan of each entry, a copy and its weight for each expert of a token, a pull for each rank.
  MOE_RT_FN void write(int64_t start, int32_t in_tile) const {
    const int num_topk = dims.num_topk();
    each_entry(in_tile, [&](int32_t i, int32_t token, int32_t k) {
      const int32_t entry = tiles.entries[i], rank = owner_of(entry), place = place_of(entry);
      const int64_t first = (start + token) * num_topk;
      if (entry < 0) {
        send_plan[first + k] = kNowhere;
        return;
      }
      const Siblings siblings = siblings_of(entry, k, tiles.entries + token * num_topk, topk_weights + first);
      send_plan[first + k] = send_entry(slots.at_home(rank, siblings.slot), siblings.first_k);
      if (has(entry, kRepeats)) return;
      const auto lists = lists_for(rank);
      const Tiles::Sent sent = tiles.sent_before(rank, token);
      const int32_t first_copy = tiles.copies[rank] + sent.copies, at = first_copy + siblings.copies_before;
      const int32_t index = tiles.rows[place] + tiles.visits_before(place, token);
      lists.copies.put(at, {place - tables.rank_first[rank], index, k, 0});
      lists.weights.put(at, siblings.weight);
      if (!has(entry, kLeads)) return;
      lists.pulls.put(tiles.pulls[rank] + sent.pulls,
                      {int32_t(start) + token, siblings.slot, first_copy, siblings.copies});
    });
  }

  // Properties of an entry that depend on the other entries of its token.
  struct Siblings {
    int32_t slot;                   // slot of the entry's rank among the ranks that the token visits
    int32_t copies, copies_before;  // copies of the token for that rank; copies with a lower place
    int32_t first_k;                // first entry that names the same expert
    Weight weight;                  // sum of the weights of this entry and its repetitions, which become one row
  };
  MOE_RT_FN Siblings siblings_of(int32_t entry, int32_t k, const int32_t* entries, const Weight* weights) const {
    const int32_t rank = owner_of(entry);
    Siblings s{0, 0, 0, k, weights[k]};
    for_topk<Dims>(dims.num_topk(), [&](int j) {
      const int32_t other = entries[j];
      s.slot += has(other, kLeads) && owner_of(other) < rank && slots.together(owner_of(other), rank);
      if (owner_of(other) != rank) return;
      s.copies += !has(other, kRepeats);
      s.copies_before += !has(other, kRepeats) && place_of(other) < place_of(entry);
      if (place_of(other) != place_of(entry)) return;
      if (j < s.first_k) s.first_k = j;
      if (j > k) s.weight += weights[j];
    });
    return s;
  }

  // Advances the running totals past this tile and clears its bit sets.
  MOE_RT_FN void pass_tile() const {
    const Range experts = strided(coop, w.shape.num_experts), ranks = strided(coop, w.shape.num_ranks);
    for (int64_t i = experts.begin; i < experts.end; i += experts.step) {
      tiles.rows[i] += tiles.visits_before(int32_t(i), tiles.tokens);
      for (int32_t word = 0; word < tiles.words; ++word) tiles.visits[i * tiles.words + word] = 0;
    }
    const int32_t words = tiles.words * tiles.digits;
    for (int64_t r = ranks.begin; r < ranks.end; r += ranks.step) {
      const Tiles::Sent sent = tiles.sent_before(int32_t(r), tiles.tokens);
      tiles.pulls[r] += sent.pulls, tiles.copies[r] += sent.copies;
      for (int32_t word = 0; word < words; ++word) tiles.copies_to[r * words + word] = 0;
    }
  }
};

template <class Coop, class Dims, class Weight, class ListsFor, class Slots>
TileRouter(Coop, const Dims&, const World&, const RoutingTables&, const ExpertIds&, const Weight*, int64_t, Tiles,
           ListsFor, int32_t*, Slots, int64_t&) -> TileRouter<Coop, Dims, Weight, ListsFor, Slots>;

}  // namespace moe_rt
