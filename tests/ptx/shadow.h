// Shadow memory: the last accesses of each byte, to find races, that is, two accesses that nothing orders.
//
// A cell stores the last write and two reads; a read replaces an earlier read that it knows of. A cell covers four
// bytes until a smaller access reaches its page.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "clocks.h"
#include "lane.h"

namespace ptx {

struct Record {
  Moment moment;
  uint16_t how = 0;
  const Site* site = nullptr;
  bool there() const { return moment.block != 0; }
};

class Shadow {
 public:
  explicit Shadow(uint64_t bytes = 0) : pages_(bytes / kPage + 1) {}

  // Call races(record) for each access that this one races with; ordered(record) is true if this one comes after it.
  template <class Ordered, class Races>
  void visit(uint64_t offset, uint32_t bytes, const Record& mine, Ordered&& ordered, Races&& races) {
    for (uint64_t at = offset; at < offset + bytes;) {
      Page& page = page_of(at, (at | bytes) % kCoarse != 0);
      visit_cell(page.cells[at % kPage / page.unit], mine, ordered, races);
      at += page.unit;
    }
  }

 private:
  static constexpr uint64_t kPage = 256, kCoarse = 4;
  struct Cell {
    Record write, reads[2];
  };
  struct Page {
    uint64_t unit = kCoarse;
    std::vector<Cell> cells = std::vector<Cell>(kPage / kCoarse);
  };

  Page& page_of(uint64_t offset, bool fine) {
    std::unique_ptr<Page>& page = pages_[offset / kPage];
    if (!page) page = std::make_unique<Page>();
    if (fine && page->unit != 1) {
      std::vector<Cell> cells;
      for (uint64_t i = 0; i < kPage; ++i) cells.push_back(page->cells[i / kCoarse]);
      page->unit = 1;
      page->cells = std::move(cells);
    }
    return *page;
  }

  template <class Ordered, class Races>
  static void visit_cell(Cell& cell, const Record& mine, Ordered&& ordered, Races&& races) {
    if (cell.write.there() && !ordered(cell.write)) races(cell.write);
    if (mine.how & kWrite) {
      for (Record& read : cell.reads) {
        if (read.there() && !ordered(read)) races(read);
        read = {};
      }
      cell.write = mine;
    } else {
      const bool first = !cell.reads[0].there() || ordered(cell.reads[0]);
      cell.reads[first ? 0 : 1] = mine;
    }
  }

  std::vector<std::unique_ptr<Page>> pages_;
};

}  // namespace ptx
