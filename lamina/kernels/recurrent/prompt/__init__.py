"""Recurrences and convolutions over many tokens: chunks in parallel, with the state carried from chunk to chunk.

Each function is `Rule.chunk` of one rule, with the number of real tokens of each row in place of a mask:

    f(rule, state, inputs, constants, counts) -> (out, new state)

    state    float32 [B, *state_shape], not written to
    inputs   name -> [B, T, *shape], any strides with the last axis contiguous, in the model's dtype or float32
    counts   int64 [B] or None: only the first counts[b] tokens of row b are real; the others may hold NaN, change
             neither the state nor another output, and their own outputs are zero
    out      as the input named by `rule.value`, in its dtype

Memory beside inputs and outputs is at most a state for each chunk. The references are the rules of
`lamina.recurrence`.
"""
