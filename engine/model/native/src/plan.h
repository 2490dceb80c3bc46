// Which tokens of a step read which keys together. Made once a step, used by every layer.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace octavo {

// One sequence's part of a step, as octavo.engine.model.runner.Row has it.
struct Row {
    int start, length, context;
    const int32_t* blocks;
    int past() const { return context - length; }
};

// Tokens that score the same keys: those at positions [from, to) of one row's block table. A token sees of them what
// does not lie behind its own position.
struct Unit {
    const int32_t* blocks;
    int from, to;
    int first_token, tokens;  // a range of Plan::tokens
    int partial;              // index of the first token's partial result; -1: the only part, which is the output itself
};

struct Plan {
    int block_size;
    std::vector<int32_t> tables;
    std::vector<Row> rows;
    std::vector<int32_t> tokens;     // packed tokens, as units name them
    std::vector<int32_t> positions;  // by packed token
    std::vector<Unit> units;
    int partials = 0;
    std::vector<std::vector<int32_t>> parts;  // by packed token: its partial results; empty where there is only one part
    std::vector<float> scratch;
};

class Planner {
   public:
    // tile: tokens of one unit at most. threads: how many will work on it. shares: whether common blocks are scored once.
    Planner(Plan& plan, int tile, int threads, bool shares)
        : plan_(plan), tile_(tile), threads_(threads), shares_(shares) {}

    void make() {
        own_from_.assign(plan_.rows.size(), 0);
        if (shares_ && plan_.rows.size() > 1) share();
        for (size_t i = 0; i < plan_.rows.size(); i++) own(plan_.rows[i], own_from_[i]);
        balance();
        settle();
    }

   private:
    static constexpr int MIN_SAVED = 32;   // tokens not read again: below that a part of its own costs more
    static constexpr int MIN_SPLIT = 128;  // keys

    struct Whole {  // a row's blocks that others can share: those that were full before the step
        int row;
        const int32_t* begin;
        const int32_t* end;
    };

    void share() {
        std::vector<Whole> wholes;
        for (size_t i = 0; i < plan_.rows.size(); i++) {
            const Row& row = plan_.rows[i];
            wholes.push_back({int(i), row.blocks, row.blocks + row.past() / plan_.block_size});
        }
        std::stable_sort(wholes.begin(), wholes.end(), [](const Whole& a, const Whole& b) {
            return std::lexicographical_compare(a.begin, a.end, b.begin, b.end);
        });
        share(wholes, 0, wholes.size(), 0, 0);
    }

    // wholes[low:high] have their first `depth` blocks in common; parts cover those up to `covered`.
    void share(const std::vector<Whole>& wholes, size_t low, size_t high, int depth, int covered) {
        while (low < high && wholes[low].end - wholes[low].begin == depth) low++;
        while (low < high) {
            size_t next = low + 1;
            while (next < high && wholes[next].begin[depth] == wholes[low].begin[depth]) next++;
            if (next - low > 1) group(wholes, low, next, depth, covered);
            low = next;
        }
    }

    void group(const std::vector<Whole>& wholes, size_t low, size_t high, int depth, int covered) {
        const Whole &first = wholes[low], &last = wholes[high - 1];  // sorted: what these two share, all do
        int shortest = std::min(first.end - first.begin, last.end - last.begin);
        int common = depth + 1;
        while (common < shortest && first.begin[common] == last.begin[common]) common++;
        int64_t saved = int64_t(high - low - 1) * (common - covered) * plan_.block_size;
        if (saved >= MIN_SAVED) {
            part(wholes, low, high, covered, common);
            covered = common;
        }
        share(wholes, low, high, common, covered);
    }

    void part(const std::vector<Whole>& wholes, size_t low, size_t high, int from, int to) {
        std::vector<int32_t> tokens;
        for (size_t i = low; i < high; i++) {
            const Row& row = plan_.rows[wholes[i].row];
            for (int t = 0; t < row.length; t++) tokens.push_back(row.start + t);
            own_from_[wholes[i].row] = to * plan_.block_size;
        }
        tiles(wholes[low].begin, from * plan_.block_size, to * plan_.block_size, tokens, false);
    }

    void own(const Row& row, int from) {
        std::vector<int32_t> tokens(row.length);
        for (int t = 0; t < row.length; t++) tokens[t] = row.start + t;
        tiles(row.blocks, from, row.context, tokens, true);
    }

    void tiles(const int32_t* blocks, int from, int to, const std::vector<int32_t>& tokens, bool is_causal) {
        for (size_t begin = 0; begin < tokens.size(); begin += tile_) {
            int count = std::min(tokens.size() - begin, size_t(tile_));
            int seen = is_causal ? std::min(to, plan_.positions[tokens[begin + count - 1]] + 1) : to;
            plan_.units.push_back({blocks, from, seen, int(plan_.tokens.size()), count, -1});
            plan_.tokens.insert(plan_.tokens.end(), tokens.begin() + begin, tokens.begin() + begin + count);
        }
    }

    // Long units are cut along the keys until every thread finds work to the end.
    void balance() {
        int64_t work = 0;
        for (const Unit& unit : plan_.units) work += int64_t(unit.to - unit.from) * unit.tokens;
        int64_t fair = threads_ > 1 ? work / (threads_ * 4) : work;
        std::vector<Unit> cut;
        for (const Unit& unit : plan_.units) {
            int64_t wanted = std::max<int64_t>(MIN_SPLIT, fair / unit.tokens);
            int most = int(std::min<int64_t>((wanted + 63) / 64 * 64, unit.to - unit.from));
            for (int from = unit.from; from < unit.to; from += most) {
                bool is_rest = unit.to - from <= most + MIN_SPLIT / 2;
                cut.push_back(unit);
                cut.back().from = from;
                cut.back().to = is_rest ? unit.to : from + most;
                if (is_rest) break;
            }
        }
        plan_.units = std::move(cut);
    }

    // Tokens with several parts get room for partial results; the largest units come first.
    void settle() {
        std::vector<int> counts(plan_.positions.size());
        for (const Unit& unit : plan_.units)
            for (int t = 0; t < unit.tokens; t++) counts[plan_.tokens[unit.first_token + t]]++;
        plan_.parts.resize(plan_.positions.size());
        for (Unit& unit : plan_.units) {
            bool is_only = true;
            for (int t = 0; t < unit.tokens; t++) is_only &= counts[plan_.tokens[unit.first_token + t]] == 1;
            if (is_only) continue;
            unit.partial = plan_.partials;
            for (int t = 0; t < unit.tokens; t++)
                plan_.parts[plan_.tokens[unit.first_token + t]].push_back(plan_.partials + t);
            plan_.partials += unit.tokens;
        }
        std::stable_sort(plan_.units.begin(), plan_.units.end(), [](const Unit& a, const Unit& b) {
            return int64_t(a.to - a.from) * a.tokens > int64_t(b.to - b.from) * b.tokens;
        });
    }

    Plan& plan_;
    int tile_, threads_;
    bool shares_;
    std::vector<int> own_from_;
};

}  // namespace octavo
