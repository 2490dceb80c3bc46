// Threads that walk through a computation together. OpenMP makes the threads; they meet here, as its own barriers put
// threads to sleep as soon as a process has more of them than processors, and waking takes longer than most operations.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

class Team {
   public:
    // All threads run `work(team)` on a copy of their own and end together.
    template <class Work>
    static void run(int threads, Work work) {
        Meeting meeting;
        if (threads == 1) {
            Team team(meeting, 0, 1);
            return work(team);
        }
#pragma omp parallel num_threads(threads)
        {
#if defined(_OPENMP)
            Team team(meeting, omp_get_thread_num(), omp_get_num_threads());
#else
            Team team(meeting, 0, 1);
#endif
            work(team);
        }
    }

    int index() const { return index_; }

    // Wait for all.
    void meet() {
        if (size_ == 1) return;
        int round = meeting_.round.load(std::memory_order_relaxed);
        if (meeting_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            meeting_.arrived.store(0, std::memory_order_relaxed);
            meeting_.next.store(0, std::memory_order_relaxed);
            meeting_.round.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; meeting_.round.load(std::memory_order_acquire) == round; spins++) {
            if (spins < PATIENCE) pause();
            else std::this_thread::yield();  // somebody else may need this processor to arrive
        }
    }

    // work(from, to): this thread's part of what lies below count; ends when all are done.
    template <class Work>
    void share(int64_t count, Work work) {
        work(count * index_ / size_, count * (index_ + 1) / size_);
        meet();
    }

    // work(i) for all i below count, in equal parts; ends when all are done.
    template <class Work>
    void split(int64_t count, Work work) {
        share(count, [&](int64_t i, int64_t end) {
            for (; i < end; i++) work(i);
        });
    }

    // work(i) for all i below count, to whoever is free; ends when all are done.
    template <class Work>
    void take(int64_t count, Work work) {
        take_ahead(count, [&](int64_t i, int64_t) { work(i); });
    }

    // The same with work(i, next). `next` is what this thread gets afterwards; -1 where that is not known yet, as the last
    // ones are left to whoever comes first.
    template <class Work>
    void take_ahead(int64_t count, Work work) {
        if (size_ == 1) {
            for (int64_t i = 0; i < count; i++) work(i, i + 1 < count ? i + 1 : -1);
            return;
        }
        auto claim = [&] { return meeting_.next.fetch_add(1, std::memory_order_relaxed); };
        for (int64_t i = claim(), next; i < count; i = next < 0 ? claim() : next) {
            next = meeting_.next.load(std::memory_order_relaxed);
            if (next + size_ >= count || !meeting_.next.compare_exchange_strong(next, next + 1, std::memory_order_relaxed))
                next = -1;  // near the end, or somebody was faster
            work(i, next);
        }
        meet();
    }

   private:
    static constexpr int PATIENCE = 2000;

    struct Meeting {
        alignas(64) std::atomic<int> arrived{0};
        alignas(64) std::atomic<int> round{0};
        alignas(64) std::atomic<int64_t> next{0};  // of `take`; back at 0 after each meeting
    };

    Team(Meeting& meeting, int index, int size) : meeting_(meeting), index_(index), size_(size) {}

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    Meeting& meeting_;
    int index_, size_;
};

}  // namespace octavo
