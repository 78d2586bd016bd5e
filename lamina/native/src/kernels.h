// The kernels of a program, for one set of instructions. Included by one file for each set.
#pragma once
#include "program.h"

#include "attention.h"
#include "codes.h"
#include "elementwise.h"
#include "ends.h"
#include "experts.h"
#include "indexer.h"
#include "latent.h"
#include "matrix.h"
#include "recall.h"
#include "recurrent.h"

#define LAMINA_KERNEL(NAME, ARGS)                                                     \
  {                                                                                   \
    #NAME, int64_t(sizeof(ARGS)),                                                     \
        [](const void* a) { return NAME##_units(static_cast<const ARGS*>(a)); },      \
        [](const void* a, int64_t i) { NAME##_run(static_cast<const ARGS*>(a), i); }  \
  }

namespace {

const lamina::Kernel KERNELS[] = {
    LAMINA_KERNEL(embed, EmbedArgs),
    LAMINA_KERNEL(norm, NormArgs),
    LAMINA_KERNEL(gated_norm, GatedNormArgs),
    LAMINA_KERNEL(rope, RopeArgs),
    LAMINA_KERNEL(quantize, QuantizeArgs),
    LAMINA_KERNEL(permute, PermuteArgs),
    LAMINA_KERNEL(product, ProductArgs),
    LAMINA_KERNEL(heads, HeadsArgs),
    LAMINA_KERNEL(attention, AttentionArgs),
    LAMINA_KERNEL(latent, LatentArgs),
    LAMINA_KERNEL(latent_out, LatentOutArgs),
    LAMINA_KERNEL(index_scores, IndexScoresArgs),
    LAMINA_KERNEL(select_tokens, SelectTokensArgs),
    LAMINA_KERNEL(recall, RecallArgs),
    LAMINA_KERNEL(convolve, ConvolveArgs),
    LAMINA_KERNEL(state, StateArgs),
    LAMINA_KERNEL(log, LogArgs),
    LAMINA_KERNEL(ssd, SsdArgs),
    LAMINA_KERNEL(scan, ScanArgs),
    LAMINA_KERNEL(delta, DeltaArgs),
    LAMINA_KERNEL(lru, LruArgs),
    LAMINA_KERNEL(wkv, WkvArgs),
    LAMINA_KERNEL(route, RouteArgs),
    LAMINA_KERNEL(experts, ExpertsArgs),
    LAMINA_KERNEL(expert_sum, ExpertSumArgs),
    LAMINA_KERNEL(elementwise, ElementwiseArgs),
    LAMINA_KERNEL(reduce, ReduceArgs),
    LAMINA_KERNEL(positions, PositionsArgs),
    LAMINA_KERNEL(choose, ChooseArgs),
    LAMINA_KERNEL(commit, CommitArgs),
    LAMINA_KERNEL(codes, CodesArgs),
};

const lamina::KernelTable ALL = {KERNELS, int64_t(sizeof(KERNELS) / sizeof(KERNELS[0]))};

}  // namespace
