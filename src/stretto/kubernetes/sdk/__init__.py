"""The Python client for a cluster: ElasticJobs through the API server, as whom the kubeconfig says.

    from stretto.kubernetes.sdk import KubernetesClient

    with KubernetesClient(context="prod", namespace="vision") as stretto:
        job = stretto.submit("job.yaml", image="registry.example/train:3")
        job = stretto.wait(job)
        print(job.phase, job.exit_code)

The methods are those of `stretto.client.Client`, and the answers are its documents, so that a script works with both.
What is different is said where it is: a job is called NAME or NAMESPACE/NAME, and to cancel one is to delete its
object. `AsyncKubernetesClient` has the same methods as coroutines. Neither talks to the controller: what it knows of a
job is in the object's status.
"""

from stretto.kubernetes.sdk.asynchronous import AsyncKubernetesClient
from stretto.kubernetes.sdk.calls import Names, elastic_job_of
from stretto.kubernetes.sdk.sync import KubernetesClient

__all__ = ["AsyncKubernetesClient", "KubernetesClient", "Names", "elastic_job_of"]
