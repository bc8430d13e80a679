# SPDX-License-Identifier: Apache-2.0
"""Ids of a prompt's tokens beside their log-probabilities: the last one of the vocabulary, and hashes beyond it."""

import types

import repro

VOCABULARY = 100


def reported(ids, start=0):
    process = repro.load_function(
        "srt/managers/scheduler_components/logprob_result_processor.py",
        "SchedulerLogprobResultProcessor._process_input_token_logprobs",
        {"List": list, "Req": object, "MIS_DELIMITER_TOKEN_ID": -1},
    )
    request = types.SimpleNamespace(
        logprob=types.SimpleNamespace(), origin_input_ids=ids, logprob_start_len=start
    )
    request.logprob.logprob_start_len = start
    processor = types.SimpleNamespace(
        model_config=types.SimpleNamespace(vocab_size=VOCABULARY),
        _is_multi_item_scoring=lambda req: False,
        _uses_scoring_positions=lambda req: False,  # its name in 0.5.23
    )
    process(processor, request, [-float(i) for i in range(len(ids))])
    return request.logprob.input_token_logprobs_idx


def test_the_last_id_of_the_vocabulary_is_itself():
    assert reported([5, VOCABULARY - 1, 0]) == [5, VOCABULARY - 1, 0]


def test_hashes_beyond_the_vocabulary_are_replaced():
    assert reported([5, VOCABULARY, 7 << 40]) == [5, 0, 0]
