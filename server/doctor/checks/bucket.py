"""The bucket that versions are published to or followed from."""

from __future__ import annotations

from collections.abc import Iterator

from server.doctor.registry import Finding, check, fail, ok, skip
from server.doctor.world import World
from weightsync.bucket.objects import Bucket
from weightsync.errors import BucketError

ACCESS = (
    "Make the bucket, and give the credentials of the environment the right to list, read, write and delete below that "
    "prefix (for S3 AWS_ACCESS_KEY_ID and the like, AWS_ENDPOINT_URL for another server than Amazon's)"
)


@check("bucket", "the bucket of versions: may be listed, written, read; keeps two publishers apart")
def bucket(world: World) -> Iterator[Finding]:
    if world.bucket is None:
        yield skip("no bucket is named: pass --bucket URL")
        return
    try:
        found = Bucket(world.bucket)
        numbers = found.numbers()
        found.try_out()
    except BucketError as error:
        yield fail(str(error), ACCESS if error.code == "bucket_unavailable" else "Name another place")
        return
    newest = f"the newest of its {len(numbers)} versions is {numbers[-1]}" if numbers else "it has no version yet"
    yield ok(f"{found.told} takes writes and refuses a second one to the same object; {newest}")
