"""Mixtures of experts.

Options of `Mixture` and `Choice` for each family. `each`, `factor` and `normed` come from the configuration where a
name stands for them. "shared" means `shared=` the inner width of the shared expert.

    family                               Choice                                   Mixture
    mixtral, minimax                     softmax, normed                          -
    qwen2_moe, qwen3_next, qwen3_5_moe   softmax, normed=norm_topk_prob           shared, opens (3_5: always normed)
    qwen3_moe, olmoe, flex_olmo          softmax, normed=norm_topk_prob           -
    phimoe                               sparsemixer, jitter=router_jitter_noise  -
    granitemoe                           softmax, normed                          factor=residual_multiplier
    granitemoeshared, granitemoehybrid   softmax, normed                          the same, shared
    jamba                                softmax                                  -
    hunyuan_v1_moe                       softmax, normed                          shared, exact
    ernie4_5_moe                         softmax, normed, least=moe_norm_min      shared, balanced, exact
    gpt_oss                              softmax, normed                          logit_bias, bias, act=Gating("silu",
                                                                                  limit, plus=1, slope=1.702)
    afmoe                                sigmoid, normed, factor=route_scale      shared, balanced
    minimax_m2                           sigmoid, normed                          balanced
    lfm2_moe                             sigmoid, normed=norm_topk_prob, eps=1e-6  balanced=use_expert_bias
                                         and factor
    deepseek_v3, glm4_moe, dots1,        sigmoid, normed=norm_topk_prob, factor,  shared, balanced, exact
    glm4_moe_lite, exaone_moe,           groups=n_group, groups_each=topk_group
    solar_open, kimi_linear, glm_moe_dsa
    mimo_v2_flash                        the same                                 balanced, exact
    nemotron_h                           the same                                 shared, balanced, exact, gated=False,
                                                                                  latent=moe_latent_size
    deepseek_v2                          softmax, factor; group_limited_greedy:   shared, exact
                                         groups, groups_each, group_best=1
    longcat_flash                        softmax, factor                          balanced, exact, identity=
                                                                                  zero_expert_num
    llama4                               sigmoid                                  shared, weigh_input
    switch_transformers                  softmax, each=1                          gated=False, exact, logit_bias=
                                                                                  router_bias, capacity
    gemma4_text                          softmax, normed                          `Router(scaled=True)` and `Experts`
                                                                                  apart: each reads another norm of x

A Switch decoder gives `Mixture.forward` a `count`, for example a recurrence without decay (`RGLRU` with g = 0), so that
tokens of earlier passes count towards the capacity and a text in chunks is the text in one pass.
"""
