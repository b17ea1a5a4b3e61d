// What every Communicator must do: the one suite for loopback, shared memory, MPI, hierarchical and
// NCCL. Called by every rank, in threads or by each process for itself:
//   conformance::CheckTransport(transport, options);        (conformance_transport.h)
//   conformance::CheckCommunicator(communicator, options);
// Results are compared with a serial reference bit for bit. A failure names configuration, rank,
// check and element.
#pragma once

#include <numeric>
#include <set>

#include "base/bytes.h"
#include "checked_cargo.h"
#include "conformance_options.h"
#include "conformance_transport.h"

namespace conformance {

class CommunicatorSuite {
 public:
  CommunicatorSuite(comm::Communicator& communicator, const ConformanceOptions& options)
      : comm_(communicator),
        options_(options),
        rank_(communicator.rank()),
        size_(communicator.size()),
        agreed_(Hash(options.seed, 1, 2)),
        own_(Hash(options.seed, rank_, 3)) {}

  void Run() {
    CheckResidual();
    for (const int64_t count : Counts()) CheckMixedAllReduce(count);
    CheckFewElements();
    if (options_.ordered) CheckOrderOfSummation();
    CheckReduceScatterAndAllGather();
    CheckSegmentIsReusedAtOnce();
    CheckAllocOnAll();
    CheckManyAtOnce();
    for (const int64_t count : Counts()) CheckCargo(count);
    if (options_.ordered) CheckOrderOfCargo();
    CheckManyCargos();
    if (options_.averages) CheckAveragesOfHalves();
    CheckAllGatherV();
    CheckBroadcast();
    CheckAllToAllV();
    CheckUnion();
    CheckMoreThanAllSequences();
    Await(comm_.Barrier(), "barrier");
  }

 private:
  // Memory of one rank and what it must become.
  struct Case {
    comm::LayoutPtr layout;
    comm::Segment* segment;
    int64_t offset;
    Bytes input, expected;
  };

  std::vector<int64_t> Counts() const { return {0, 1, 37, options_.chunk_nbytes * 5 / 8 + 1}; }

  // --- Failures and waiting ---

  [[noreturn]] void Fail(const std::string& what, const std::string& text) {
    // Memory goes away now: no Work may use it any more.
    comm_.transport().Abort({Kind::kInternal, "the conformance suite has failed"});
    throw testing::Failure(options_.name + ", rank " + std::to_string(rank_) + " of " +
                           std::to_string(size_) + " (" + comm_.name() + "): " + what + ": " +
                           text);
  }
  void Expect(bool ok, const std::string& what, const std::string& text) {
    if (!ok) Fail(what, text);
  }
  void Await(comm::Work& work, const std::string& what) {
    const Status status = comm::Wait(work, comm_.transport(), options_.timeout, what);
    if (!status.ok()) Fail(what, status.ToString());
  }
  void Await(const comm::WorkPtr& work, const std::string& what) { Await(*work, what); }
  // Polls all, in an order of this rank's own: a Work advances only when polled.
  void AwaitAll(std::vector<comm::WorkPtr>* works, const std::string& what) {
    std::shuffle(works->begin(), works->end(), own_);
    const Nanos start = Now();
    comm::Backoff backoff;
    while (true) {
      const uint32_t ticket = comm_.transport().bell().Ticket();
      const auto finished = [](const comm::WorkPtr& work) { return work->Poll(); };
      const int64_t left = works->size() - std::count_if(works->begin(), works->end(), finished);
      if (left == 0) break;
      const Nanos waited = Now() - start;
      Expect(waited < options_.timeout, what, std::to_string(left) + " works did not finish");
      backoff.Pause(comm_.transport().bell(), ticket, comm_.transport().MustPoll(),
                    options_.timeout - waited);
    }
    for (const auto& work : *works) Await(*work, what);
  }

  // --- Segments ---

  void Write(comm::Segment& segment, int64_t offset, const Bytes& bytes) {
    options_.write(static_cast<char*>(segment.data()) + offset, bytes.data(), bytes.size());
  }
  Bytes Read(comm::Segment& segment, int64_t offset, int64_t nbytes) {
    Bytes bytes(nbytes);
    options_.read(bytes.data(), static_cast<char*>(segment.data()) + offset, nbytes);
    return bytes;
  }
  comm::SegmentPtr Alloc(int64_t nbytes) {
    comm::SegmentPtr segment = comm_.Alloc(nbytes);
    Expect(segment->nbytes() >= nbytes, "Alloc", "less than asked for");
    return segment;
  }
  Case MakeCase(comm::LayoutPtr layout, comm::Segment& segment, int64_t offset, uint64_t seed) {
    return {layout, &segment, offset, Inputs(*layout, seed, rank_, halvings_),
            Reduced(*layout, seed, size_, halvings_)};
  }
  void CheckCase(const Case& c, const std::string& what, reduce::Range range) {
    const Bytes got = Read(*c.segment, c.offset, c.layout->nbytes());
    const std::string difference = Difference(*c.layout, got.data(), c.expected.data(), range);
    Expect(difference.empty(), what, difference);
  }
  void CheckCase(const Case& c, const std::string& what) {
    CheckCase(c, what, {0, c.layout->nbytes()});
  }

  // --- Reductions ---

  comm::LayoutPtr Mixed(int64_t count, uint64_t seed) const {
    return MixedLayout(count, seed, options_.averages, options_.plain);
  }

  // What is missing to the mean: the product of all factors on the way is a power of two.
  void CheckResidual() {
    if (!options_.averages) return;
    const double product = size_ * comm_.average_residual();
    halvings_ = static_cast<int>(std::lround(std::log2(product)));
    Expect(halvings_ >= 0 && std::abs(product - std::ldexp(1.0, halvings_)) < 1e-9 * product,
           "average_residual", "times size it is no power of two: " + std::to_string(product));
  }

  void CheckMixedAllReduce(int64_t count) {
    const uint64_t seed = agreed_();
    const std::string what =
        "allreduce of every dtype and operation, " + std::to_string(count) + " elements";
    const auto layout = Mixed(count, seed);
    const int64_t offset = reduce::kAlign * static_cast<int64_t>(seed % 4);
    const auto segment = Alloc(offset + layout->nbytes() + reduce::kAlign);
    const Bytes guard(reduce::kAlign, 'g');
    Write(*segment, offset + layout->nbytes(), guard);
    const Case c = MakeCase(layout, *segment, offset, seed);
    Write(*segment, offset, c.input);
    Await(comm_.AllReduce(*segment, offset, layout), what);
    CheckCase(c, what);
    Expect(Read(*segment, offset + layout->nbytes(), reduce::kAlign) == guard, what,
           "bytes behind the layout have changed");
  }

  // One section alone, from none to a few elements.
  void CheckFewElements() {
    const auto segment = Alloc(4096);
    for (int64_t count = 0; count < 20; ++count) {
      const auto layout = std::make_shared<reduce::Layout>(
          std::vector<reduce::Section>{{0, count, DType::kFloat32, reduce::ReduceOp::kSum}});
      const Case c = MakeCase(layout, *segment, 0, agreed_());
      Write(*segment, 0, c.input);
      const std::string what = "allreduce of " + std::to_string(count) + " float32";
      Await(comm_.AllReduce(*segment, 0, layout), what);
      CheckCase(c, what);
    }
  }

  std::vector<int> NodeOf() const {
    if (!options_.node_of.empty()) return options_.node_of;
    std::vector<int> each(size_);
    std::iota(each.begin(), each.end(), 0);
    return each;
  }

  // Elements alone, in long data, at other offsets, scattered: always the same bits, those of the
  // tree.
  void CheckOrderOfSummation() {
    const std::string what = "order of summation";
    const uint64_t seed = agreed_();
    for (const int64_t count : {int64_t{5}, options_.chunk_nbytes * 3 / 4 + 3}) {
      const auto layout = FloatingLayout(count, seed, options_.averages);
      std::vector<Bytes> inputs;
      for (int r = 0; r < size_; ++r) inputs.push_back(RoundedInputs(*layout, seed, r));
      const auto segment = Alloc(1024 + layout->nbytes());
      for (const int64_t offset : {int64_t{0}, int64_t{704}}) {
        const Case c{layout, segment.get(), offset, inputs[rank_],
                     ReduceInOrder(*layout, inputs, NodeOf(), halvings_)};
        Write(*segment, offset, c.input);
        Await(comm_.AllReduce(*segment, offset, layout), what);
        CheckCase(c, what + ", " + std::to_string(count) + " elements at offset " +
                         std::to_string(offset));
        for (const auto& parts : SeveralParts(layout->nbytes())) {
          Write(*segment, offset, c.input);
          Await(comm_.ReduceScatter(*segment, offset, layout, parts), what);
          CheckCase(c, what + " in reduce_scatter", parts[rank_]);
        }
      }
    }
  }

  // Equal, unequal, empty and shuffled parts of [0, nbytes).
  std::vector<std::vector<reduce::Range>> SeveralParts(int64_t nbytes) {
    const std::vector<reduce::Range> equal = reduce::Split(nbytes, size_);
    std::vector<reduce::Range> first(size_, {nbytes, nbytes}), last(size_, {0, 0});
    first.front() = last.back() = {0, nbytes};
    std::vector<int64_t> cuts = {0, nbytes};
    for (int r = 1; r < size_; ++r) {
      cuts.push_back(static_cast<int64_t>(agreed_() % (nbytes / reduce::kAlign + 1)) *
                     reduce::kAlign);
    }
    std::sort(cuts.begin(), cuts.end());
    std::vector<reduce::Range> random;
    for (int r = 0; r < size_; ++r) random.push_back({cuts[r], cuts[r + 1]});
    std::shuffle(random.begin(), random.end(), agreed_);
    return {equal, first, last, random};
  }

  void CheckReduceScatterAndAllGather() {
    for (const int64_t count : Counts()) {
      const auto layout = Mixed(count, agreed_());
      const auto segment = Alloc(layout->nbytes() + 64);
      for (const auto& parts : SeveralParts(layout->nbytes())) {
        const std::string what =
            "reduce_scatter and allgather, " + std::to_string(count) + " elements a section";
        Case c = MakeCase(layout, *segment, 64, agreed_());
        Write(*segment, 64, c.input);
        Await(comm_.ReduceScatter(*segment, 64, layout, parts), what);
        CheckCase(c, what + ", own part", parts[rank_]);
        Await(comm_.AllGather(*segment, 64, parts), what);
        CheckCase(c, what + ", all parts");
      }
      for (const auto& parts : SeveralParts(layout->nbytes())) {
        const Bytes all = Inputs(*layout, 1, 0, halvings_);
        Bytes mine(all.size(), 'x');
        std::copy(all.begin() + parts[rank_].begin, all.begin() + parts[rank_].end,
                  mine.begin() + parts[rank_].begin);
        Write(*segment, 64, mine);
        Await(comm_.AllGather(*segment, 64, parts), "allgather of parts");
        Expect(Read(*segment, 64, layout->nbytes()) == all, "allgather of parts", "wrong bytes");
      }
    }
  }

  // The next use starts as soon as the own Work has finished, whatever the peers are doing.
  void CheckSegmentIsReusedAtOnce() {
    const auto layout = FloatingLayout(options_.chunk_nbytes / 4 + 5, agreed_(), false);
    const auto segment = Alloc(layout->nbytes());
    for (int round = 0; round < 12; ++round) {
      const Case c = MakeCase(layout, *segment, 0, agreed_());
      Write(*segment, 0, c.input);
      if (own_() % 4 == 0) std::this_thread::yield();
      Await(comm_.AllReduce(*segment, 0, layout), "reuse of a segment");
      CheckCase(c, "reuse of a segment, round " + std::to_string(round));
      Write(*segment, 0, Bytes(layout->nbytes(), '\x7f'));
    }
  }

  void CheckAllocOnAll() {
    const auto layout = Mixed(11, agreed_());
    comm::SegmentPtr segment;
    Await(comm_.AllocOnAll(4096 + layout->nbytes(), &segment), "Alloc on all ranks");
    Expect(segment && segment->nbytes() >= 4096 + layout->nbytes(), "Alloc on all ranks",
           "no room");
    const Case c = MakeCase(layout, *segment, 4096, agreed_());
    Write(*segment, 4096, c.input);
    Await(comm_.AllReduce(*segment, 4096, layout), "a segment of all ranks");
    CheckCase(c, "a segment of all ranks");
  }

  // Works of several kinds unfinished together, two of them on one segment; each rank waits in its
  // own order.
  void CheckManyAtOnce() {
    const std::string what = "many at once";
    for (int round = 0; round < 3; ++round) {
      std::vector<comm::SegmentPtr> segments;
      std::vector<Case> cases;
      std::vector<comm::WorkPtr> works;
      std::vector<int64_t> ones(size_, 1);
      Bytes gathered(size_), mine(1, static_cast<char>(rank_)), root(3000, rank_ == 0 ? 'r' : ' ');
      std::string blob = Set({rank_});
      cases.reserve(16);
      for (int i = 0; i < 6; ++i) {
        const auto layout = Mixed(i % 3 == 0 ? options_.chunk_nbytes / 16 : 11, agreed_());
        segments.push_back(Alloc(2 * layout->nbytes()));
        for (const int64_t offset : {int64_t{0}, layout->nbytes()}) {
          cases.push_back(MakeCase(layout, *segments.back(), offset, agreed_()));
          Write(*segments.back(), offset, cases.back().input);
          works.push_back(comm_.AllReduce(*segments.back(), offset, layout));
        }
        if (i == 1) works.push_back(comm_.AllGatherV(mine.data(), gathered.data(), ones));
        if (i == 2) works.push_back(comm_.Union(&blob, MergeSets));
        if (i == 3) works.push_back(comm_.Broadcast(root.data(), 3000, 0));
        if (i == 4) works.push_back(comm_.Barrier());
      }
      AwaitAll(&works, what);
      for (const Case& c : cases) CheckCase(c, what);
      for (int r = 0; r < size_; ++r) Expect(gathered[r] == r, what, "allgather is wrong");
      Expect(root == Bytes(3000, 'r'), what, "broadcast is wrong");
      Expect(blob == SetOfAll(), what, "union is wrong");
    }
  }

  // --- Cargos ---

  std::shared_ptr<testing::CheckedCargo> MakeCargo(Bytes input) {
    return std::make_shared<testing::CheckedCargo>(std::move(input), options_.write, options_.read);
  }
  void CheckResult(const reduce::Layout& layout, const testing::CheckedCargo& cargo,
                   const Bytes& expected, const std::string& what) {
    Expect(cargo.whole(), what, "not all was packed and unpacked");
    const std::string difference =
        Difference(layout, cargo.output.data(), expected.data(), {0, layout.nbytes()});
    Expect(difference.empty(), what, difference);
  }

  void CheckCargo(int64_t count) {
    const uint64_t seed = agreed_();
    const auto layout = Mixed(count, seed);
    const auto cargo = MakeCargo(Inputs(*layout, seed, rank_, halvings_));
    const std::string what =
        "allreduce of a cargo of every dtype, " + std::to_string(count) + " elements";
    Await(comm_.AllReduceCargo(layout, cargo), what);
    CheckResult(*layout, *cargo, Reduced(*layout, seed, size_, halvings_), what);
  }

  // The same bits as in a segment, whatever the chunks are.
  void CheckOrderOfCargo() {
    for (const int64_t count :
         {int64_t{3}, options_.chunk_nbytes / 5 + 1, options_.chunk_nbytes + 7}) {
      const uint64_t seed = agreed_();
      const auto layout = FloatingLayout(count, seed, options_.averages);
      std::vector<Bytes> inputs;
      for (int r = 0; r < size_; ++r) inputs.push_back(RoundedInputs(*layout, seed, r));
      const std::string what = "order of summation in a cargo of " + std::to_string(count);
      const auto cargo = MakeCargo(inputs[rank_]);
      Await(comm_.AllReduceCargo(layout, cargo), what);
      CheckResult(*layout, *cargo, ReduceInOrder(*layout, inputs, NodeOf(), halvings_), what);
      const auto segment = Alloc(layout->nbytes());
      Write(*segment, 0, inputs[rank_]);
      Await(comm_.AllReduce(*segment, 0, layout), what);
      const Bytes same = Read(*segment, 0, layout->nbytes());
      CheckResult(*layout, *cargo, same, what + ", against a segment");
    }
  }

  // Several in flight, large ones, small ones and segments between them.
  void CheckManyCargos() {
    const std::string what = "many cargos at once";
    for (int round = 0; round < 3; ++round) {
      std::vector<comm::LayoutPtr> layouts;
      std::vector<std::shared_ptr<testing::CheckedCargo>> cargos;
      std::vector<Bytes> expected;
      std::vector<comm::WorkPtr> works;
      comm::SegmentPtr segment;
      std::vector<Case> cases;
      cases.reserve(1);
      for (int i = 0; i < 9; ++i) {
        const uint64_t seed = agreed_();
        const int64_t count = i % 3 == 0 ? 1 : static_cast<int64_t>(seed >> 8) % (10 << i);
        layouts.push_back(Mixed(count, seed));
        cargos.push_back(MakeCargo(Inputs(*layouts.back(), seed, rank_, halvings_)));
        expected.push_back(Reduced(*layouts.back(), seed, size_, halvings_));
        works.push_back(comm_.AllReduceCargo(layouts.back(), cargos.back()));
        if (i != 4) continue;
        segment = Alloc(layouts.back()->nbytes());
        cases.push_back(MakeCase(layouts.back(), *segment, 0, seed));
        Write(*segment, 0, cases.back().input);
        works.push_back(comm_.AllReduce(*segment, 0, layouts.back()));
      }
      AwaitAll(&works, what);
      for (size_t i = 0; i < cargos.size(); ++i) {
        CheckResult(*layouts[i], *cargos[i], expected[i], what + ", number " + std::to_string(i));
      }
      CheckCase(cases[0], what);
    }
    Expect(comm_.window_nbytes() >= 0, what, "window_nbytes is negative");
  }

  // See Note [Averages of halves]: 40000 must not overflow, 1e-7 must not vanish.
  void CheckAveragesOfHalves() {
    const auto layout = std::make_shared<reduce::Layout>(
        std::vector<reduce::Section>{{0, 3, DType::kFloat16, reduce::ReduceOp::kAverage}});
    const auto segment = Alloc(layout->nbytes());
    for (const float value : {40000.0f, 1e-7f}) {
      Bytes bytes(layout->nbytes());
      const Float16 half = ToFloat16(value);
      for (int i = 0; i < 3; ++i) std::memcpy(bytes.data() + 2 * i, &half, 2);
      Write(*segment, 0, bytes);
      const std::string what = "average of " + std::to_string(value) + " as float16";
      Await(comm_.AllReduce(*segment, 0, layout), what);
      const double got =
          LoadNumber(Read(*segment, 0, layout->nbytes()).data(), DType::kFloat16, 2) *
          comm_.average_residual();
      if (value > 1) {
        Expect(ToFloat(ToFloat16(static_cast<float>(got))) == 40000.0f, what,
               "got " + std::to_string(got));
      } else {
        // Each halving may round a subnormal by half an ulp, 2^-25, of what the residual then
        // multiplies. Nodes of different sizes halve more often than the number of ranks needs, and
        // 1e-7 is two ulps.
        const double tolerance = 0x1p-25 * std::max(1, halvings_) * comm_.average_residual();
        const bool may_vanish = (1 << halvings_) >= 2 * size_;
        Expect((got > 0 || may_vanish) && std::abs(got - ToFloat(half)) <= tolerance, what,
               "got " + std::to_string(got * 1e7) + "e-7");
      }
    }
  }

  // --- Moving bytes ---

  int64_t BlockSize(uint64_t seed, int from, int to) const {
    const int64_t sizes[] = {0, 1, 7, 64, 1000, options_.chunk_nbytes + 3};
    return sizes[Hash(seed, from, to) % 6];
  }
  Bytes Block(uint64_t seed, int from, int to) const {
    Bytes bytes(BlockSize(seed, from, to));
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<char>(Hash(seed, from * 1000 + to, i));
    }
    return bytes;
  }

  void CheckAllGatherV() {
    for (int round = 0; round < 4; ++round) {
      const uint64_t seed = agreed_();
      std::vector<int64_t> nbytes;
      Bytes expected;
      for (int r = 0; r < size_; ++r) {
        const Bytes block = round == 0 ? Bytes() : Block(seed, r, 0);
        nbytes.push_back(static_cast<int64_t>(block.size()));
        expected.insert(expected.end(), block.begin(), block.end());
      }
      const Bytes mine = round == 0 ? Bytes() : Block(seed, rank_, 0);
      Bytes all(expected.size(), 'x');
      Await(comm_.AllGatherV(mine.data(), all.data(), nbytes), "allgather");
      Expect(all == expected, "allgather", "wrong bytes in round " + std::to_string(round));
    }
  }

  void CheckBroadcast() {
    for (int root = 0; root < size_; ++root) {
      for (const int64_t nbytes :
           {int64_t{0}, int64_t{1}, int64_t{37}, 3 * options_.chunk_nbytes + 1}) {
        const uint64_t seed = agreed_();
        Bytes data(nbytes), expected(nbytes);
        for (int64_t i = 0; i < nbytes; ++i) expected[i] = static_cast<char>(Hash(seed, i, root));
        if (rank_ == root) data = expected;
        const std::string what =
            "broadcast of " + std::to_string(nbytes) + " bytes from rank " + std::to_string(root);
        Await(comm_.Broadcast(data.data(), nbytes, root), what);
        Expect(data == expected, what, "wrong bytes");
      }
    }
  }

  void CheckAllToAllV() {
    for (int round = 0; round < 4; ++round) {
      const uint64_t seed = agreed_();
      std::vector<int64_t> send, recv;
      Bytes in, expected;
      for (int r = 0; r < size_; ++r) {
        const Bytes out_block = round == 0 ? Bytes() : Block(seed, rank_, r);
        const Bytes in_block = round == 0 ? Bytes() : Block(seed, r, rank_);
        send.push_back(static_cast<int64_t>(out_block.size()));
        recv.push_back(static_cast<int64_t>(in_block.size()));
        in.insert(in.end(), out_block.begin(), out_block.end());
        expected.insert(expected.end(), in_block.begin(), in_block.end());
      }
      Bytes out(expected.size(), 'x');
      Await(comm_.AllToAllV(in.data(), send, out.data(), recv), "alltoall");
      Expect(out == expected, "alltoall", "wrong bytes in round " + std::to_string(round));
    }
  }

  // Sets of numbers: blobs of different sizes.
  static std::string Set(const std::set<int>& numbers) {
    Writer writer;
    for (const int n : numbers) writer.Put<int32_t>(n);
    return writer.Take();
  }
  static std::string MergeSets(const std::string& a, const std::string& b) {
    std::set<int> numbers;
    for (const std::string* text : {&a, &b}) {
      for (Reader reader(*text); !reader.AtEnd();) numbers.insert(reader.Get<int32_t>());
    }
    return Set(numbers);
  }
  std::string SetOfAll() const {
    std::set<int> numbers;
    for (int r = 0; r < size_; ++r) numbers.insert(r);
    return Set(numbers);
  }

  void CheckUnion() {
    // Rank r brings r, r + 1, ..., and nothing at all if r is 1.
    const auto brought = [&](int r, int count) {
      std::set<int> numbers;
      for (int i = 0; i < count * r && r != 1; ++i) numbers.insert(r + i);
      return numbers;
    };
    for (const int count : {0, 1, 5, 3000}) {
      std::set<int> all;
      for (int r = 0; r < size_; ++r) all.merge(brought(r, count));
      std::string blob = Set(brought(rank_, count));
      Await(comm_.Union(&blob, MergeSets), "union");
      Expect(blob == Set(all), "union", "wrong set of up to " + std::to_string(count * size_));
    }
  }

  // Short works without waiting in between: tags come round again.
  void CheckMoreThanAllSequences() {
    const int n = comm::kSequences + 20;
    std::vector<int32_t> data(n, rank_ == 0 ? 42 : 0);
    std::vector<comm::WorkPtr> works;
    for (int i = 0; i < n; ++i) works.push_back(comm_.Broadcast(&data[i], sizeof(int32_t), 0));
    for (auto& work : works) Await(*work, "more works than sequence numbers");
    Expect(data == std::vector<int32_t>(n, 42), "more works than sequence numbers", "wrong data");
  }

  comm::Communicator& comm_;
  const ConformanceOptions& options_;
  const int rank_, size_;
  int halvings_ = 0;
  std::mt19937_64 agreed_;  // gives the same on all ranks
  std::mt19937_64 own_;
};

// Throws testing::Failure. Collective over the communicator's ranks; nothing else may be under way
// on it.
inline void CheckCommunicator(comm::Communicator& communicator, const ConformanceOptions& options) {
  CommunicatorSuite(communicator, options).Run();
}

}  // namespace conformance
