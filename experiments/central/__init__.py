"""The central kind of experiment: a search whose per-user losses meet at a curator, stated by a recipe.

| file | what |
|---|---|
| `spec` | the recipe |
| `objectives` | the registered objectives: a recipe names one, it cannot bring code |
| `building` | recipe and objective → one of the searches of `dpray.searchers` |
| `plan` | what it would spend, and how noisy its releases would be |
| `experiment` | the seam to `pipeline` |
| `job`, `walk` | a run: the search in Ray Tune, and what is shown of every release |
| `report`, `path_plot`, `outcome` | what it says at its end |
"""
