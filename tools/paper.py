"""Numbers of the paper."""

METHODS = ("td3_bc_n", "sac_bc_n", "td3_bc", "edac", "sac_n", "msg")
NAMES = {"td3_bc_n": "TD3-BC-N", "sac_bc_n": "SAC-BC-N", "td3_bc": "TD3+BC", "edac": "EDAC"}
NAMES |= {"sac_n": "SAC-N", "msg": "MSG", "cql": "CQL", "iql": "IQL", "bc": "BC"}
# Table 1: scores of these methods; None where the paper has none
TABLE_1 = {
    "halfcheetah-medium-v2": (63.3, 65.6, 48.3, 65.9, 67.5, None),
    "halfcheetah-medium-replay-v2": (55.3, 61.5, 44.6, 61.3, 63.9, None),
    "halfcheetah-medium-expert-v2": (101.7, 102.6, 90.7, 106.3, 107.1, None),
    "halfcheetah-expert-v2": (103.8, 105.3, 96.7, 106.8, 105.2, None),
    "hopper-medium-v2": (101.5, 101.2, 59.3, 101.6, 100.3, None),
    "hopper-medium-replay-v2": (99.1, 100.8, 60.9, 101.0, 101.8, None),
    "hopper-medium-expert-v2": (112.3, 111.3, 98.0, 110.7, 110.1, None),
    "hopper-expert-v2": (112.7, 111.5, 107.8, 110.1, 110.3, None),
    "walker2d-medium-v2": (90.9, 85.3, 83.7, 92.5, 87.9, None),
    "walker2d-medium-replay-v2": (91.4, 90.8, 81.8, 87.1, 78.7, None),
    "walker2d-medium-expert-v2": (113.5, 110.9, 110.1, 114.7, 116.7, None),
    "walker2d-expert-v2": (113.2, 110.4, 110.2, 115.1, 107.4, None),
    "maze2d-umaze-v1": (153.1, 128.9, None, None, None, 101.1),
    "maze2d-medium-v1": (133.9, 137.8, None, None, None, 57.0),
    "maze2d-large-v1": (145.8, 141.4, None, None, None, 159.3),
    "antmaze-umaze-v0": (98.3, 98.6, 78.6, None, None, 97.8),
    "antmaze-umaze-diverse-v0": (90.6, 91.2, 71.4, None, None, 81.8),
    "antmaze-medium-play-v0": (87.0, 85.8, 10.6, None, None, 89.6),
    "antmaze-medium-diverse-v0": (86.2, 73.8, 3.0, None, None, 88.6),
    "antmaze-large-play-v0": (76.2, 65.8, 0.2, None, None, 72.6),
    "antmaze-large-diverse-v0": (74.2, 75.8, 0.0, None, None, 71.4),
    "pen-cloned-v1": (67.2, 58.0, None, 68.2, 64.1, None),
    "pen-human-v1": (72.8, 70.3, None, 52.1, 9.5, None),
}
SCORES = {
    method: {name: row[i] for name, row in TABLE_1.items() if row[i] is not None}
    for i, method in enumerate(METHODS)
}
# Appendix, on an RTX 2080 Ti: seconds per 10,000 gradient steps, by script and number of critics
SECONDS = {("td3_bc_n", 10): 31, ("sac_bc_n", 10): 62, ("td3_bc", 2): 26}
SECONDS |= {("edac", 10): 76, ("edac", 20): 86, ("edac", 50): 136}
SECONDS |= {("msg", 4): 65, ("msg", 64): 131, ("cql", 2): 123, ("iql", 2): 54}
