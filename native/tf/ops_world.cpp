// GradredWorld: who is who, asked when the graph runs.
#include <algorithm>

#include "engine/engine.h"
#include "ops.h"
#include "shapes.h"

namespace gradred::tf {
namespace {

struct WorldKernel {
  std::string what;
  int process_set;
};

void* CreateWorld(TF_OpKernelConstruction* construction) {
  return new WorldKernel{StringAttr(construction, "what"),
                         static_cast<int>(IntAttr(construction, "process_set"))};
}
void DestroyWorld(void* kernel) { delete static_cast<WorldKernel*>(kernel); }

int ValueOf(const WorldKernel& kernel) {
  const std::shared_ptr<engine::Engine> engine = engine::Global();
  const comm::Topology& topology = engine->topology();
  if (kernel.what == "rank") return topology.rank;
  if (kernel.what == "local_rank") return topology.local_rank;
  if (kernel.what == "local_size") return topology.local_size;
  const std::vector<int> ranks = engine->ProcessSetRanks(kernel.process_set);
  if (kernel.what == "size") return static_cast<int>(ranks.size());
  if (kernel.what == "included")
    return std::binary_search(ranks.begin(), ranks.end(), topology.rank) ? 1 : 0;
  throw Error(Kind::kInternal, "GradredWorld: '" + kernel.what + "' is not known");
}

void World(void* kernel, TF_OpKernelContext* context) {
  const int value = ValueOf(*static_cast<const WorldKernel*>(kernel));
  const TensorPtr output = NewOutput(context, 0, TF_INT32, {});
  *static_cast<int32_t*>(DataOf(output.get())) = value;
}

}  // namespace

const std::vector<OpDefinition>& WorldOps() {
  static const auto* ops = new std::vector<OpDefinition>{
      {"GradredWorld",
       {"what: string", "process_set: int = 0"},
       {},
       {"value: int32"},
       /*stateful=*/true,  // or the graph optimizer would keep the value of now
       &ShapeScalar,
       &CreateWorld,
       &DestroyWorld,
       &World,
       nullptr},
  };
  return *ops;
}

}  // namespace gradred::tf
