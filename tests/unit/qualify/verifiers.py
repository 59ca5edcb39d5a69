"""Verifiers as third parties write them, right and wrong on purpose; each is written for its shape, none copied."""

from __future__ import annotations

import random

import torch


# ------------------------------------------------------------------------------------------------------ vLLM's shape
def vllm_style(draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_probs, bonus_token_ids, sampling_metadata):  # fmt: skip
    """Flattened rows; one exponential noise a request, shared by the races of all its positions."""
    device, vocab = target_probs.device, target_probs.shape[-1]
    output = torch.full((len(num_draft_tokens), max_spec_len + 1), -1, dtype=torch.int32, device=device)
    uniforms = torch.rand(len(draft_token_ids), dtype=torch.float64)
    noise = torch.empty((len(num_draft_tokens), vocab), dtype=torch.float32)
    noise.exponential_()
    begin = 0
    for row, count in enumerate(num_draft_tokens):
        for place in range(count):
            at = begin + place
            token = draft_token_ids[at]
            q = 1.0 if draft_probs is None else draft_probs[at, token]
            if uniforms[at] < target_probs[at, token] / q:
                output[row, place] = token
                continue
            if draft_probs is None:
                left = target_probs[at].clone()
                left[token] = 0
            else:
                left = (target_probs[at] - draft_probs[at]).clamp(min=0)
            output[row, place] = (left / noise[row]).argmax(-1)
            break
        else:
            output[row, count] = bonus_token_ids[row, 0]
        begin += count
    return output


def vllm_style_neighbours(draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_probs, bonus_token_ids, sampling_metadata):  # fmt: skip
    """As above, but all rows of a call race by the same noise and are accepted by the same uniforms."""
    uniforms, noise = torch.rand(max_spec_len, dtype=torch.float64), torch.rand(1, dtype=torch.float64)
    output, begin = [], 0
    for row, count in enumerate(num_draft_tokens):
        ids = []
        for place in range(count):
            at, token = begin + place, int(draft_token_ids[begin + place])
            q = (
                torch.eye(target_probs.shape[-1], dtype=torch.float64)[token]
                if draft_probs is None
                else draft_probs[at]
            )
            if uniforms[place] < target_probs[at, token] / q[token]:
                ids.append(token)
                continue
            left = (target_probs[at] - q).clamp(min=0)
            ids.append(int(torch.searchsorted((left / left.sum()).cumsum(0), noise, right=True)))
            break
        else:
            ids.append(int(bonus_token_ids[row, 0]))
        output.append(ids + [-1] * (max_spec_len + 1 - len(ids)))
        begin += count
    return torch.tensor(output)


# ------------------------------------------------------------------------------------------------- flashinfer's shape
def chain_speculative_sampling(draft_probs, draft_token_ids, target_probs, maybe_output_accepted_token_num=None, maybe_output_emitted_draft_token_num=None, deterministic=True, generator=None):  # fmt: skip
    """Vectorised: every position's residual is drawn, one is used."""
    ids = draft_token_ids.long()
    batch, num_drafts = ids.shape
    p = target_probs[:, :-1].gather(-1, ids[..., None])[..., 0]
    q = draft_probs.gather(-1, ids[..., None])[..., 0]
    accepted = torch.rand(batch, num_drafts, generator=generator) < p / q
    emitted = accepted.long().cumprod(-1).sum(-1)
    left = (target_probs[:, :-1] - draft_probs).clamp(min=0)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, target_probs[:, :-1])
    weights = torch.cat((left, target_probs[:, -1:]), 1)
    drawn = torch.multinomial(weights.flatten(0, 1), 1, generator=generator).view(batch, num_drafts + 1)
    places = torch.arange(num_drafts + 1)
    padded = torch.nn.functional.pad(ids, (0, 1))
    output = torch.where(places < emitted[:, None], padded, torch.where(places == emitted[:, None], drawn, -1))
    return output.int(), accepted.sum(-1), emitted


def chain_with_uniform_samples(draft_probs, draft_token_ids, uniform_samples, target_probs, deterministic=True):
    """The older signature: uniforms from outside, the last of them for the added token."""
    output, counts = [], []
    for ids, q, u, p in zip(draft_token_ids.tolist(), draft_probs, uniform_samples, target_probs, strict=True):
        emitted = plain_with_uniforms(ids, q, p, u)
        output.append(emitted + [-1] * (len(ids) + 1 - len(emitted)))
        counts.append(len(emitted) - 1)
    return torch.tensor(output), torch.tensor(counts), torch.tensor(counts)


# ------------------------------------------------------------------------------------------------------- plain shapes
def plain(draft_ids, draft_probs, target_probs):
    """Its own generator, Gumbel noise for what is added."""
    for place, token in enumerate(draft_ids.tolist()):
        if torch.rand(()) < target_probs[place, token] / draft_probs[place, token]:
            continue
        left = (target_probs[place] - draft_probs[place]).clamp(min=0)
        gumbel = -torch.log(-torch.log(torch.rand_like(left)))
        return [*draft_ids[:place].tolist(), (left.log() + gumbel).argmax().item()]
    gumbel = -torch.log(-torch.log(torch.rand_like(target_probs[-1])))
    return [*draft_ids.tolist(), (target_probs[-1].log() + gumbel).argmax().item()]


def plain_with_uniforms(draft_ids, draft_probs, target_probs, uniforms):
    """Python floats and lists; the last uniform is for what is added."""
    emitted = []
    for place, token in enumerate(draft_ids):
        p, q = float(target_probs[place, token]), float(draft_probs[place, token])
        if uniforms[place].item() * q < p:
            emitted.append(int(token))
            continue
        left = (target_probs[place] - draft_probs[place]).clamp(min=0)
        return [*emitted, _inverse(left, uniforms[-1].item())]
    return [*emitted, _inverse(target_probs[len(draft_ids)], uniforms[-1].item())]


def _inverse(mass, uniform):
    cdf = (mass / mass.sum()).cumsum(0)
    for token, edge in enumerate(cdf.tolist()):
        if uniform < edge:
            return token
    return int(mass.nonzero()[-1])


def plain_batch(draft_ids, draft_probs, target_probs):
    """Rows of ids, one row after the other."""
    return [plain(*row) for row in zip(draft_ids, draft_probs, target_probs, strict=True)]


# --------------------------------------------------------------------------------------------------- wrong on purpose
def reused_uniform(draft_ids, draft_probs, target_probs):
    """The uniform that rejected a draft draws its replacement."""
    for place, token in enumerate(draft_ids.tolist()):
        uniform = torch.rand(1, dtype=torch.float64)
        if uniform < target_probs[place, token] / draft_probs[place, token]:
            continue
        left = (target_probs[place] - draft_probs[place]).clamp(min=0)
        cdf = (left / left.sum()).cumsum(0)
        return [*draft_ids[:place].tolist(), torch.searchsorted(cdf, uniform, right=True).item()]
    return [*draft_ids.tolist(), torch.multinomial(target_probs[-1], 1).item()]


def residual_from_wrong_row(draft_ids, draft_probs, target_probs):
    """The target's row after the rejected token, less the draft's row of the token."""
    ratio = target_probs[:-1].gather(-1, draft_ids[:, None])[:, 0] / draft_probs.gather(-1, draft_ids[:, None])[:, 0]
    count = int((torch.rand_like(ratio) < ratio).long().cumprod(0).sum())
    if count == len(draft_ids):
        return [*draft_ids.tolist(), torch.multinomial(target_probs[-1], 1).item()]
    left = (target_probs[count + 1] - draft_probs[count]).clamp(min=0)
    left = left if left.sum() > 0 else target_probs[count + 1]
    return [*draft_ids[:count].tolist(), torch.multinomial(left, 1).item()]


def fewer_drafts(draft_ids, draft_probs, target_probs):
    """Breaks where there is no draft."""
    if not len(draft_ids):
        msg = "no drafts"
        raise ValueError(msg)
    return plain(draft_ids, draft_probs, target_probs)


def empty_residual(draft_ids, draft_probs, target_probs):
    """Divides by a residual that is empty where p = q, and draws it whether it is needed or not."""
    left = (target_probs[:-1] - draft_probs).clamp(min=0)
    torch.multinomial(left / left.sum(-1, keepdim=True), 1)
    return plain(draft_ids, draft_probs, target_probs)


def bfloat16_ratio(draft_ids, draft_probs, target_probs):
    """Acceptance in bfloat16, whatever it is given."""
    for place, token in enumerate(draft_ids.tolist()):
        ratio = (target_probs[place, token] / draft_probs[place, token]).bfloat16()
        if torch.rand_like(ratio) < ratio:
            continue
        left = (target_probs[place] - draft_probs[place]).clamp(min=0)
        return [*draft_ids[:place].tolist(), torch.multinomial(left, 1).item()]
    return [*draft_ids.tolist(), torch.multinomial(target_probs[-1], 1).item()]


_SYSTEM = random.Random(5)


def seed_ignored(draft_ids, draft_probs, target_probs):
    """Random numbers that torch's seed has no hold on, and that can't be followed."""
    for place, token in enumerate(draft_ids.tolist()):
        if _SYSTEM.random() < float(target_probs[place, token] / draft_probs[place, token]):
            continue
        left = (target_probs[place] - draft_probs[place]).clamp(min=0)
        return [*draft_ids[:place].tolist(), _SYSTEM.choices(range(len(left)), left.tolist())[0]]
    return [*draft_ids.tolist(), _SYSTEM.choices(range(target_probs.shape[-1]), target_probs[-1].tolist())[0]]


def normal_noise(draft_ids, draft_probs, target_probs):
    """Vectorised and right, but its uniforms are made of normals, which aren't followed here."""
    batch, num_drafts = draft_ids.shape
    uniforms = torch.special.ndtr(torch.randn(batch, num_drafts + 1, dtype=torch.float64))
    p = target_probs[:, :-1].gather(-1, draft_ids[..., None])[..., 0]
    q = draft_probs.gather(-1, draft_ids[..., None])[..., 0]
    emitted = (uniforms[:, :-1] < p / q).long().cumprod(-1).sum(-1)
    padded = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))
    rows = torch.arange(batch)
    left = (target_probs[rows, emitted] - padded[rows, emitted]).clamp(min=0)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, target_probs[rows, emitted])
    cdf = left.cumsum(-1)
    drawn = torch.searchsorted(cdf, uniforms[:, -1:] * cdf[:, -1:], right=True).clamp(max=cdf.shape[-1] - 1)
    output = torch.nn.functional.pad(draft_ids, (0, 1)).scatter(1, emitted[:, None], drawn)
    return output.masked_fill(torch.arange(num_drafts + 1) > emitted[:, None], -1)


def normal_noise_accepting_more(draft_ids, draft_probs, target_probs):
    """The same with the ratio times 1.2."""
    return normal_noise(draft_ids, draft_probs / 1.2, target_probs)


def none_means_uniform(draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_probs, bonus_token_ids, sampling_metadata):  # fmt: skip
    """Drafts without probabilities are taken to be drawn evenly."""
    if draft_probs is None:
        draft_probs = torch.full_like(target_probs, 1 / target_probs.shape[-1])
    return vllm_style(
        draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_probs,
        bonus_token_ids, sampling_metadata,
    )  # fmt: skip


def shortcut_when_equal(draft_ids, draft_probs, target_probs):
    """Where the laws are the same it accepts everything, and adds the most probable id."""
    if len(draft_ids) > 1 and torch.equal(target_probs[:-1], draft_probs):
        return [*draft_ids.tolist(), target_probs[-1].argmax().item()]
    return plain(draft_ids, draft_probs, target_probs)


def half_ratio(draft_ids, draft_probs, target_probs):
    """The ratio is rounded to float16: a two-thousandth of it, up or down."""
    for place, token in enumerate(draft_ids.tolist()):
        ratio = (target_probs[place, token] / draft_probs[place, token]).half().double()
        if torch.rand((), dtype=torch.float64) < ratio:
            continue
        left = (target_probs[place] - draft_probs[place]).clamp(min=0)
        return [*draft_ids[:place].tolist(), torch.multinomial(left, 1).item()]
    return [*draft_ids.tolist(), torch.multinomial(target_probs[-1], 1).item()]


def residual_of_the_row_before(draft_ids, draft_probs, target_probs):
    """Off by one, the other way."""
    for place, token in enumerate(draft_ids.tolist()):
        if torch.rand((), dtype=torch.float64) < target_probs[place, token] / draft_probs[place, token]:
            continue
        row = max(place - 1, 0)
        left = (target_probs[row] - draft_probs[row]).clamp(min=0)
        law = left if left.sum() > 0 else target_probs[row]
        return [*draft_ids[:place].tolist(), torch.multinomial(law, 1).item()]
    return [*draft_ids.tolist(), torch.multinomial(target_probs[-1], 1).item()]


def tolerant_ratio(draft_ids, draft_probs, target_probs):
    """A ratio is taken for 1 when it is within 96 units of rounding: nothing in float64, three quarters in bfloat16."""
    for place, token in enumerate(draft_ids.tolist()):
        ratio = target_probs[place, token] / draft_probs[place, token]
        if ratio > 1 - 96 * torch.finfo(ratio.dtype).eps or torch.rand((), dtype=torch.float64) < ratio:
            continue
        left = (target_probs[place] - draft_probs[place]).clamp(min=0)
        return [*draft_ids[:place].tolist(), torch.multinomial(left, 1).item()]
    return [*draft_ids.tolist(), torch.multinomial(target_probs[-1], 1).item()]
