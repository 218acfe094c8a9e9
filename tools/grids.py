"""The named grids of tools.sweep: a title, then the arguments of one or more sweeps."""

from tools.paper import TABLE_1 as PAPER
from tools.runs import FINETUNE, OFFLINE


def datasets(*tasks):
    """The datasets of the paper's Table 1 that are of these tasks."""
    return " ".join(name for name in PAPER if name.startswith(tasks))


SEEDS = "--seed 1 2 3 4 5"
LOCOMOTION, HALFCHEETAH = datasets("halfcheetah", "hopper", "walker2d"), datasets("halfcheetah")
HOPPER, WALKER2D, MAZE2D = datasets("hopper"), datasets("walker2d"), datasets("maze2d")
ANTMAZE, PEN, TABLE_1 = datasets("antmaze"), datasets("pen"), datasets("")
TINY = "tiny-maze2d-umaze-v0"
GRIDS = {
    "paper": ("Table 1", f"td3_bc_n sac_bc_n --env-id {TABLE_1} {SEEDS}"),
    "paper-adroit": (
        "all Adroit tasks, TD3-BC-N",
        f"td3_bc_n --env-id {PEN} hammer-cloned-v1 hammer-human-v1 door-cloned-v1 door-human-v1 "
        f"relocate-cloned-v1 relocate-human-v1 {SEEDS}",
    ),
    "paper-variable-beta": (
        "best beta per dataset; runs with the default beta are shared with paper",
        f"td3_bc_n --env-id halfcheetah-medium-v2 halfcheetah-medium-replay-v2 --beta 0 {SEEDS}",
        f"td3_bc_n --env-id halfcheetah-medium-expert-v2 halfcheetah-expert-v2 {SEEDS}",
        f"td3_bc_n --env-id hopper-medium-v2 hopper-medium-replay-v2 --beta 0.01 {SEEDS}",
        f"td3_bc_n --env-id hopper-medium-expert-v2 hopper-expert-v2 {SEEDS}",
        f"td3_bc_n --env-id walker2d-medium-v2 --beta 0.01 {SEEDS}",
        f"td3_bc_n --env-id walker2d-medium-expert-v2 --beta 0 {SEEDS}",
        f"td3_bc_n --env-id walker2d-medium-replay-v2 walker2d-expert-v2 {SEEDS}",
        f"sac_bc_n --env-id {HALFCHEETAH} {SEEDS}",
        f"sac_bc_n --env-id hopper-medium-v2 hopper-medium-expert-v2 hopper-expert-v2 {SEEDS}",
        f"sac_bc_n --env-id hopper-medium-replay-v2 walker2d-medium-replay-v2 --beta 0 {SEEDS}",
        f"sac_bc_n --env-id walker2d-medium-v2 walker2d-medium-expert-v2 --beta 0.001 {SEEDS}",
        f"sac_bc_n --env-id walker2d-expert-v2 {SEEDS}",
    ),
    "paper-finetune": (
        "the runs of paper, and the fine-tuning of each",
        f"{' '.join(OFFLINE + FINETUNE)} --env-id {TABLE_1} {SEEDS}",
    ),
    "paper-ablations": (
        "runs of paper, beta 0, N 2, no inflation, shared targets; critic-init torch (ours)",
        f"td3_bc_n --env-id {TABLE_1} {SEEDS}",
        f"td3_bc_n --env-id {LOCOMOTION} --beta 0 {SEEDS}",
        f"td3_bc_n --env-id {LOCOMOTION} --num-critics 2 {SEEDS}",
        f"td3_bc_n --env-id {LOCOMOTION} --bc-inflation 1 {SEEDS}",
        f"td3_bc_n --env-id {ANTMAZE} {PEN} --no-independent-targets {SEEDS}",
        f"td3_bc_n --env-id {TABLE_1} --critic-init torch {SEEDS}",
    ),
    "paper-n-beta": (
        "N x beta, shared and independent targets (section 5.3); the values of beta are ours",
        "td3_bc_n --env-id hopper-medium-expert-v2 --num-critics 2 5 10 20 50 "
        f"--beta 0 0.01 0.03 0.1 0.3 1 --independent-targets false true {SEEDS}",
    ),
    "paper-baselines": (
        "the methods that the paper compares with, where it does; IQL, CQL and BC everywhere",
        f"td3_bc --env-id {LOCOMOTION} {ANTMAZE} {SEEDS}",
        f"edac --env-id {LOCOMOTION} {PEN} {SEEDS}",
        f"msg --env-id {MAZE2D} {ANTMAZE} {SEEDS}",
        f"sac_bc_n --beta 0 --env-id {HALFCHEETAH} --gradient-steps 3000000 {SEEDS}",
        f"sac_bc_n --beta 0 --env-id {HOPPER} --num-critics 500 --gradient-steps 3000000 {SEEDS}",
        f"sac_bc_n --beta 0 --env-id {WALKER2D} --num-critics 20 --gradient-steps 3000000 {SEEDS}",
        f"sac_bc_n --beta 0 --env-id {PEN} --num-critics 100 --gradient-steps 3000000 {SEEDS}",
        f"iql cql bc --env-id {TABLE_1} {SEEDS}",
    ),
    "tiny": (
        "small version of paper-n-beta, on the bundled dataset",
        f"td3_bc_n --env-id {TINY} --num-critics 2 5 10 20 --beta 0 0.02 0.2 1 "
        "--independent-targets false true --bc-inflation 1 --seed 1",
    ),
    "tiny-baselines": (
        "all methods on the bundled dataset, with more than one value of their main argument",
        f"td3_bc_n sac_bc_n bc --env-id {TINY} {SEEDS}",
        f"td3_bc --env-id {TINY} --alpha 1 2.5 5 10 {SEEDS}",
        f"iql --env-id {TINY} --expectile 0.7 0.9 --temperature 3 10 {SEEDS}",
        f"cql --env-id {TINY} --alpha-prime 1 5 20 {SEEDS}",
        f"edac --env-id {TINY} --eta 0.1 1 10 {SEEDS}",
        f"msg --env-id {TINY} --alpha-prime 0.1 0.5 2 {SEEDS}",
        f"sac_bc_n --env-id {TINY} --beta 0 --num-critics 10 50 {SEEDS}",
    ),
}
