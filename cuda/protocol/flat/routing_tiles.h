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
#include "pushing.h"

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
  int32_t* rows;                    // [E] rows of the tokens before the tile
  int32_t *pulls, *copies;          // [R] of the tokens before the tile; then the tile's start in the lists
  int32_t *all_pulls, *all_copies;  // [R] of the tokens after the tile; then of all tokens

  MOE_RT_FN static int32_t words_of(int32_t tokens) { return (tokens + 31) / 32; }
  MOE_RT_FN static int32_t digits_of(int32_t number) {
    int32_t digits = 0;
    for (; number > 0; number /= 2) ++digits;
    return digits;
  }
  // Number of ints that route() zeroes; they come first.
  MOE_RT_FN static int64_t num_cleared(const Shape& s, int32_t tokens) {
    const int64_t words = words_of(tokens);
    return s.num_experts * (words + 1) + s.num_ranks * (words * digits_of(s.num_topk) + 4);
  }
  MOE_RT_FN static int64_t num_ints(const Shape& s, int32_t tokens) {
    return num_cleared(s, tokens) + int64_t{2} * tokens * s.num_topk;
  }
  // Number of tiles: at least 1, also without tokens.
  MOE_RT_FN static int64_t number(int64_t num_tokens, int32_t tokens) {
    return num_tokens > tokens ? (num_tokens + tokens - 1) / tokens : 1;
  }
  MOE_RT_FN static Tiles view(int32_t* ints, const Shape& s, int32_t tokens) {
    Tiles t{};
    t.tokens = tokens, t.words = words_of(tokens), t.digits = digits_of(s.num_topk);
    t.visits = reinterpret_cast<uint32_t*>(ints);
    t.copies_to = t.visits + int64_t{s.num_experts} * t.words;
    t.rows = ints + int64_t{s.num_experts} * t.words + int64_t{s.num_ranks} * t.words * t.digits;
    t.pulls = t.rows + s.num_experts;
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
  MOE_RT_FN void route(int index, int count) const {
    const Range mine = contiguous_chunk(Tiles::number(num_tokens, tiles.tokens), index, count);
    const Range cleared = strided(coop, Tiles::num_cleared(w.shape, tiles.tokens));
    for (int64_t i = cleared.begin; i < cleared.end; i += cleared.step) tiles.visits[i] = 0;
    for (int64_t tile = mine.begin; tile < mine.end; ++tile) {
      const int64_t start = tile * tiles.tokens, end = smaller(start + tiles.tokens, num_tokens);
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
      coop.sync();
      pass_tile();
      coop.sync();
    }
    if (index + 1 < count) return;
    const Range experts = strided(coop, w.shape.num_experts);
    for (int64_t i = experts.begin; i < experts.end; i += experts.step) {
      const int32_t entry = tables.entries[i], place = place_of(entry);
      lists_for(owner_of(entry)).counts.put(place, tiles.rows[place]);
    }
  }

 private:
  MOE_RT_FN int32_t decode(int64_t at) const {
    const int64_t expert = topk_idx[at];
    if (expert < -1 || expert >= w.shape.num_experts) fetch_min_relaxed(bad_entry, at);
    return tables.entry(expert);
  }

  // Flags each entry and sets the bits of its token, one entry per lane. Lanes sync neither before nor after.
  MOE_RT_FN void mark(int64_t start, int32_t in_tile) const {
    const int num_topk = dims.num_topk();
    const int32_t num_entries = in_tile * num_topk;
    for (int32_t i = coop.rank(); i < num_entries; i += coop.size()) tiles.decoded[i] = decode(start * num_topk + i);
    coop.sync();
    for (int32_t i = coop.rank(); i < num_entries; i += coop.size()) {
      const int32_t token = i / num_topk, k = i % num_topk, entry = tiles.decoded[i];
      bool repeats = false, leads = true;
      for_topk<Dims>(num_topk, [&](int j) {
        const int32_t other = tiles.decoded[token * num_topk + j];
        const bool same = other == entry && j < k;
        repeats |= same;
        leads &= !(same || (owner_of(other) == owner_of(entry) && other < entry));
      });
      tiles.entries[i] = entry < 0 ? kNoEntry : entry | (repeats ? kRepeats : 0) | (leads ? kLeads : 0);
      if (entry < 0 || repeats) continue;
      fetch_or_relaxed(tiles.visits[place_of(entry) * tiles.words + token / 32], 1u << token % 32);
    }
    coop.sync();
    for (int32_t i = coop.rank(); i < num_entries; i += coop.size()) {
      const int32_t token = i / num_topk, entry = tiles.entries[i];
      if (!has(entry, kLeads)) continue;
      int32_t num_copies = 0;
      for_topk<Dims>(num_topk, [&](int j) {
        const int32_t other = tiles.entries[token * num_topk + j];
        num_copies += owner_of(other) == owner_of(entry) && !has(other, kRepeats);
      });
      for (int32_t digit = 0; digit < tiles.digits; ++digit) {
        if ((num_copies >> digit & 1) == 0) continue;
        const int32_t word = owner_of(entry) * tiles.words + token / 32;
        fetch_or_relaxed(tiles.copies_to[word * tiles.digits + digit], 1u << token % 32);
      }
    }
  }

  // Counts the tokens outside [begin, end), one token per lane: rows of each expert for tokens before; for tokens after
  // only copies of each rank, since their rows are not needed.
  MOE_RT_FN void count_others(int64_t begin, int64_t end) const {
    const Range others = strided(coop, num_tokens - (end - begin));
    for (int64_t i = others.begin; i < others.end; i += others.step) {
      const bool before = i < begin;
      const int64_t first = (before ? i : i + (end - begin)) * dims.num_topk();
      int32_t token[Dims::kTopkBound];
      for_topk<Dims>(dims.num_topk(), [&](int k) { token[k] = decode(first + k); });
      for_topk<Dims>(dims.num_topk(), [&](int k) {
        bool repeats = token[k] < 0, visited = repeats;
        for_topk<Dims>(dims.num_topk(), [&](int j) {
          repeats |= j < k && token[j] == token[k];
          visited |= j < k && owner_of(token[j]) == owner_of(token[k]);
        });
        if (repeats) return;
        const int32_t rank = owner_of(token[k]);
        fetch_add_relaxed(before ? tiles.rows[place_of(token[k])] : tiles.all_copies[rank], 1);
        if (!visited) fetch_add_relaxed(before ? tiles.pulls[rank] : tiles.all_pulls[rank], 1);
      });
    }
  }

  // Completes the counts of each rank.
  MOE_RT_FN void sum_up() const {
    const Range experts = strided(coop, w.shape.num_experts), ranks = strided(coop, w.shape.num_ranks);
    for (int64_t i = experts.begin; i < experts.end; i += experts.step) {
      if (tiles.rows[i] == 0) continue;
      fetch_add_relaxed(tiles.copies[w.placement.owner[i]], tiles.rows[i]);
      fetch_add_relaxed(tiles.all_copies[w.placement.owner[i]], tiles.rows[i]);
    }
    for (int64_t r = ranks.begin; r < ranks.end; r += ranks.step) {
      const Tiles::Sent sent = tiles.sent_before(int32_t(r), tiles.tokens);
      tiles.all_pulls[r] += tiles.pulls[r] + sent.pulls;
      fetch_add_relaxed(tiles.all_copies[r], sent.copies);
    }
  }

  MOE_RT_FN void find_places(bool tell_receivers) const {
    const Range ends = strided(coop, w.shape.num_ranks + 1);
    for (int64_t r = ends.begin; r < ends.end; r += ends.step) {
      int32_t pulls = 0, copies = 0;
      for (int32_t s = 0; s < r; ++s) pulls += tiles.all_pulls[s], copies += tiles.all_copies[s];
      for (int32_t reader = 0; tell_receivers && reader < lists_for.number(); ++reader) {
        const auto lists = lists_for(reader);
        lists.pull_offs.put(r, pulls), lists.copy_offs.put(r, copies);
      }
      if (r < w.shape.num_ranks) tiles.pulls[r] += pulls, tiles.copies[r] += copies;
    }
  }

  // Writes each entry's copy, weight and send_plan entry, and its token's pull, one entry per lane.
  MOE_RT_FN void write(int64_t start, int32_t in_tile) const {
    const int num_topk = dims.num_topk();
    for (int32_t i = coop.rank(); i < in_tile * num_topk; i += coop.size()) {
      const int32_t token = i / num_topk, k = i % num_topk, entry = tiles.entries[i];
      const int64_t first = (start + token) * num_topk;
      if (entry < 0) {
        send_plan[first + k] = kNowhere;
        continue;
      }
      const int32_t rank = owner_of(entry);
      int32_t slot = 0, before = 0, num_copies = 0, first_k = k;
      Weight weight = topk_weights[first + k];
      for_topk<Dims>(num_topk, [&](int j) {
        const int32_t other = tiles.entries[token * num_topk + j];
        slot += has(other, kLeads) && owner_of(other) < rank && slots.together(owner_of(other), rank);
        if (owner_of(other) != rank) return;
        num_copies += !has(other, kRepeats);
        before += !has(other, kRepeats) && place_of(other) < place_of(entry);
        if (place_of(other) != place_of(entry)) return;
        if (j < first_k) first_k = j;
        if (j > k) weight += topk_weights[first + j];  // duplicates become one row, weights added
      });
      send_plan[first + k] = send_entry(slots.at_home(rank, slot), first_k);
      if (has(entry, kRepeats)) continue;
      const int32_t place = place_of(entry);
      const auto lists = lists_for(rank);
      const Tiles::Sent sent = tiles.sent_before(rank, token);
      const int32_t first_copy = tiles.copies[rank] + sent.copies, at = first_copy + before;
      const int32_t index = tiles.rows[place] + tiles.visits_before(place, token);
      lists.copies.put(at, {place - w.placement.rank_first[rank], index, k, 0});
      lists.weights.put(at, weight);
      if (!has(entry, kLeads)) continue;
      lists.pulls.put(tiles.pulls[rank] + sent.pulls, {int32_t(start) + token, slot, first_copy, num_copies});
    }
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
