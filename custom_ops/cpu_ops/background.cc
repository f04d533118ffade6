#include "background.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace fd {
namespace {

// The share of a core that is left to the work when a step wants the core too: about 15 %.
constexpr int kNice = 7;

void lower_priority() { setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNice); }

}  // namespace

void run_in_background(int threads, const std::function<void()>& body) {
  std::mutex mutex;
  std::exception_ptr failure;
  const auto run = [&] {
    lower_priority();
    try {
      body();
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<std::thread> workers;
  workers.reserve(static_cast<size_t>(threads));
  try {
    for (int i = 0; i < threads; ++i) workers.emplace_back(run);
  } catch (const std::system_error&) {
    if (workers.empty()) throw;  // with fewer threads the work takes longer
  }
  for (std::thread& worker : workers) worker.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace fd
