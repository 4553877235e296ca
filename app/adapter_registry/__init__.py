"""Which adapters a model has: loaded by all its workers, or by none.

**A load** has two phases. An API process records it and says so on a channel; every live worker of the model that runs
a language model fetches the adapter, gives it to its engine, lists it in its own record, and reports. With the last
report, in the same step of Redis, the name is published. If one fails, or time passes, nothing is published, and all
let it go. Whoever reports or looks settles what can be settled, so no load depends on the process that began it.

**Versions.** An adapter is `name@version`, the version being a hash of its content. Other content under a name is
another adapter: requests go to it from the moment it is published. A request counts among the users of the adapter
that its name stood for when it came, until it ends, and workers keep an adapter that is no longer published until
nobody uses it.

**Who joins** loads what is published, and registers in one step with the check that nothing is missing. Who dies is
waited for no longer, and a load that has no worker left ends soon. A worker that does not hold an adapter is no
candidate for its requests, and its engine refuses them: none is answered by the base model.
"""

from app.adapter_registry.records import Load, Published, Report, Wanted, adapter_id, lora_number
from app.adapter_registry.registry import AdapterRegistry, changed

__all__ = ["AdapterRegistry", "Load", "Published", "Report", "Wanted", "adapter_id", "changed", "lora_number"]
