"""The learner on hand-made samples: what the draft may not change, what packing may not change, what is skipped."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from learner_cases import make_config, make_learner, make_samples

from torchspec.errors import Interrupted, RunError
from torchspec.losses.config import RLConfig


def gradients_of_first_step(config, samples):
    """The gradients that the optimizers would have used (they are told not to move)."""
    learner = make_learner(config)
    found = {}
    for name in ("policy", "draft"):
        optimizer = getattr(learner, f"{name}_optimizer")
        if optimizer is not None:
            module = getattr(learner, name)

            def keep(name=name, module=module):
                found[name] = {k: p.grad.clone() for k, p in module.named_parameters() if p.grad is not None}

            optimizer.step = keep
            optimizer.clip = lambda: torch.tensor(1.0)
    result = learner.update(samples, 1, lambda done, total: None)
    return found, result


def without_draft(config):
    return dataclasses.replace(config, draft=dataclasses.replace(config.draft, enabled=False))


@pytest.mark.parametrize("extra_steps", [0, 2])
def test_the_draft_does_not_touch_the_policys_gradients(extra_steps):
    config = make_config()
    config = dataclasses.replace(config, draft=dataclasses.replace(config.draft, extra_steps=extra_steps))
    samples = make_samples(1, live=lambda i: i < 6)
    with_draft, _ = gradients_of_first_step(config, samples)
    alone, _ = gradients_of_first_step(without_draft(config), samples)
    assert with_draft["policy"].keys() == alone["policy"].keys()
    assert all(torch.equal(with_draft["policy"][k], alone["policy"][k]) for k in alone["policy"])
    assert all(g.abs().sum() > 0 for g in with_draft["draft"].values())


def close(a, b):
    return {k: float((a[k] - b[k]).norm() / b[k].norm().clamp_min(1e-12)) for k in b}


@pytest.mark.parity
@pytest.mark.parametrize("loss_norm", ["token", "sequence", "constant"])
def test_microbatches_change_nothing(loss_norm):
    config = make_config(rl=RLConfig(prompts_per_step=4, samples_per_prompt=2, loss_norm=loss_norm))
    samples = make_samples(2, live=lambda i: i != 3)
    whole = dataclasses.replace(config, train=dataclasses.replace(config.train, tokens_per_microbatch=10_000))
    small = dataclasses.replace(config, train=dataclasses.replace(config.train, tokens_per_microbatch=23))
    one, result_one = gradients_of_first_step(whole, samples)
    many, result_many = gradients_of_first_step(small, samples)
    for name in ("policy", "draft"):
        assert max(close(many[name], one[name]).values()) < 2e-5
    for key, value in result_one.metrics.items():
        if not key.startswith("time/"):
            assert result_many.metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_stored_taps_give_the_same_draft_gradient_as_the_streaming_way():
    """A gate that lets every row pass takes the stored way; without it the counts are known ahead."""
    config = make_config()
    samples = make_samples(3)
    streaming, _ = gradients_of_first_step(config, samples)
    learner_config = dataclasses.replace(config, draft=dataclasses.replace(config.draft, extra_steps=1))
    stored, _ = gradients_of_first_step(learner_config, samples)
    # The extra step recomputes the gradient on unmoved weights (step() is a stub), on top of the first one.
    assert max(close({k: v / 2 for k, v in stored["draft"].items()}, streaming["draft"]).values()) < 1e-5


def snapshot(learner):
    return {k: v.clone() for k, v in learner.policy.state_dict().items()}, {
        k: v.clone() for k, v in learner.draft.state_dict().items()
    }


def moved(before, module):
    return any(not torch.equal(before[k], v) for k, v in module.state_dict().items())


def test_all_groups_dropped_moves_the_draft_only_and_no_schedule():
    learner = make_learner(make_config())
    policy, draft = snapshot(learner)
    result = learner.update(make_samples(4, live=lambda i: False), 1, lambda done, total: None)
    assert not result.skipped
    assert not moved(policy, learner.policy) and learner.policy_optimizer.num_steps == 0
    assert moved(draft, learner.draft) and learner.draft_optimizer.num_steps == 1


def test_all_groups_dropped_without_use_dropped_groups_moves_nothing():
    config = make_config()
    config = dataclasses.replace(config, draft=dataclasses.replace(config.draft, use_dropped_groups=False))
    learner = make_learner(config)
    policy, draft = snapshot(learner)
    learner.update(make_samples(4, live=lambda i: False), 1, lambda done, total: None)
    assert not moved(policy, learner.policy) and not moved(draft, learner.draft)
    assert learner.policy_optimizer.num_steps == learner.draft_optimizer.num_steps == 0


@pytest.mark.parametrize("where", ["policy", "draft"])
def test_nan_skips_both_models_together(where):
    learner = make_learner(make_config())
    with torch.no_grad():
        parameter = next(p for p in getattr(learner, where).parameters() if p.ndim == 2)
        parameter[0, 0] = float("nan")
    policy, draft = snapshot(learner)
    result = learner.update(make_samples(5), 1, lambda done, total: None)
    assert result.skipped
    for before, module in ((policy, learner.policy), (draft, learner.draft)):
        assert all(torch.equal(before[k].nan_to_num(7.0), v.nan_to_num(7.0)) for k, v in module.state_dict().items())
    assert learner.policy_optimizer.num_steps == learner.draft_optimizer.num_steps == 0
    assert all(p.grad is None for p in [*learner.policy.parameters(), *learner.draft.parameters()])


def test_draft_every_and_extra_steps_are_counted():
    config = make_config()
    config = dataclasses.replace(config, draft=dataclasses.replace(config.draft, every=2, extra_steps=3))
    learner = make_learner(config)
    learner.update(make_samples(6), 1, lambda done, total: None)
    assert learner.draft_optimizer.num_steps == 0
    learner.update(make_samples(7), 2, lambda done, total: None)
    assert learner.draft_optimizer.num_steps == 4
    assert learner.policy_optimizer.num_steps == 2


def test_nan_in_an_extra_step_does_not_reach_the_weights():
    config = make_config()
    config = dataclasses.replace(config, draft=dataclasses.replace(config.draft, extra_steps=2))
    learner = make_learner(config)
    norms = iter([learner.draft_optimizer.clip, lambda: torch.tensor(torch.nan)])
    learner.draft_optimizer.clip = lambda: next(norms)()
    result = learner.update(make_samples(7), 1, lambda done, total: None)
    assert learner.draft_optimizer.num_steps == 1 and result.metrics["draft/extra_steps_stopped"] == 1
    assert not result.skipped and learner.policy_optimizer.num_steps == 1
    assert all(p.grad is None for p in learner.draft.parameters())


def test_several_updates_use_old_logprobs_from_before_the_first():
    config = make_config(rl=RLConfig(prompts_per_step=4, samples_per_prompt=2, updates_per_rollout=2))
    learner = make_learner(config)
    result = learner.update(make_samples(8), 1, lambda done, total: None)
    assert learner.policy_optimizer.num_steps == 2
    # The second update's ratio is against the weights before the first, so it is not exactly one.
    assert abs(result.metrics["policy/ratio_mean"] - 1.0) > 1e-7


def test_a_stop_before_the_first_optimizer_step_leaves_everything():
    learner = make_learner(make_config(), stop=type("Stop", (), {"signal": "SIGINT", "__bool__": lambda s: True})())
    policy, draft = snapshot(learner)
    with pytest.raises(Interrupted):
        learner.update(make_samples(9), 1, lambda done, total: None)
    assert not moved(policy, learner.policy) and not moved(draft, learner.draft)


def test_reference_gives_zero_kl_at_the_start_and_pulls_back_later():
    config = make_config(rl=RLConfig(prompts_per_step=4, samples_per_prompt=2, kl_coef=0.1))
    learner = make_learner(config)
    samples = make_samples(10)
    first = learner.update(samples, 1, lambda done, total: None)
    second = learner.update(samples, 2, lambda done, total: None)
    assert first.metrics["policy/kl"] == pytest.approx(0.0, abs=1e-9)
    assert second.metrics["policy/kl"] > 1e-7


def test_state_goes_on_bit_equal():
    config = make_config()
    straight = make_learner(config)
    for step in (1, 2):
        straight.update(make_samples(step), step, lambda done, total: None)
    saved = copy.deepcopy(straight.state_dict())
    straight.update(make_samples(3), 3, lambda done, total: None)
    resumed = make_learner(config, seed=99)
    resumed.load_state_dict(saved)
    resumed.update(make_samples(3), 3, lambda done, total: None)
    for a, b in ((straight.policy, resumed.policy), (straight.draft, resumed.draft)):
        assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


def test_a_state_of_another_run_is_refused_in_a_sentence():
    config = make_config()
    plain = make_learner(without_draft(config)).state_dict()
    with pytest.raises(RunError, match="no draft: its run had draft.enabled = false"):
        make_learner(config).load_state_dict(plain)
    pulled = dataclasses.replace(config, rl=RLConfig(prompts_per_step=4, samples_per_prompt=2, kl_coef=0.1))
    with pytest.raises(RunError, match="no reference policy: its run had rl.kl_coef = 0"):
        make_learner(pulled).load_state_dict(make_learner(config).state_dict())
    wider = dataclasses.replace(config, policy=dataclasses.replace(config.policy, intermediate_size=64))
    with pytest.raises(RunError, match=r"another policy: .*gate_proj.weight is \[48, 32\] there and \[64, 32\] here"):
        make_learner(wider).load_state_dict(make_learner(config).state_dict())
