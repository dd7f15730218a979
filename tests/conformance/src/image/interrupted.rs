//! Calls that end early: at their deadline, by cancellation, or because their future is dropped.

use drivers_api::{BoxFuture, CancelFlag, Change, ErrorKind, Image, ImageRef};
use futures_util::future::{join, join_all};

use super::Kit;
use crate::kit::{Check, Ending, failed, same};

impl Kit<'_> {
    /// Pulling the image converges, seen by an instance with an empty memory.
    async fn converges(&self, reference: &ImageRef) -> Check {
        let driver = self.open().await?;
        let _ = self.pull(&*driver, reference).await?;
        let _ = self.there(&*driver, reference).await?;
        let again = self.pull(&*driver, reference).await?;
        same("pull after the repeat", &again.change, &Change::Unchanged)
    }

    async fn clears(&self, reference: &ImageRef) -> Check {
        let driver = self.open().await?;
        let _ = self.delete(&*driver, reference).await?;
        self.gone(&*driver, reference).await
    }
}

fn nothing<'a>() -> BoxFuture<'a, Check> {
    Box::pin(std::future::ready(Ok(())))
}

pub(super) async fn deadline(kit: &Kit<'_>) -> Check {
    ended(kit, Ending::Deadline).await
}

pub(super) async fn cancelled(kit: &Kit<'_>) -> Check {
    ended(kit, Ending::Cancel).await
}

async fn ended(kit: &Kit<'_>, how: Ending) -> Check {
    let driver: &dyn Image = &*kit.open().await?;
    let reference = &kit.image(0).await;
    let pull =
        |cx| -> BoxFuture<'_, _> { Box::pin(async move { driver.pull(&cx, reference).await }) };
    let untouched = || -> BoxFuture<'_, Check> { Box::pin(kit.gone(driver, reference)) };
    let remade = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            kit.converges(reference).await?;
            kit.clears(reference).await
        })
    };
    kit.run.ended("pull", how, pull, untouched, remade).await
}

/// One of several pulls of one content is cancelled; the others succeed.
pub(super) async fn cancelled_beside(kit: &Kit<'_>) -> Check {
    let driver: &dyn Image = &*kit.open().await?;
    let reference = &kit.image(0).await;
    for polite in [true, false] {
        let flag = CancelFlag::new();
        let cx = kit.run.cx().with_cancel(flag.clone());
        let leaver = async {
            let call = driver.pull(&cx, reference);
            if polite {
                let raise = async {
                    tokio::task::yield_now().await;
                    flag.cancel();
                };
                join(call, raise).await.0.map(drop)
            } else {
                // The first caller's future is dropped after its first poll.
                let mut call = std::pin::pin!(call);
                std::future::poll_fn(|task| {
                    let _ = call.as_mut().poll(task);
                    std::task::Poll::Ready(Ok(()))
                })
                .await
            }
        };
        let others = join_all((0..4).map(|_| kit.pull(driver, reference)));
        let (left, others) = join(leaver, others).await;
        match left {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::Cancelled => {}
            Err(error) => return failed(format_args!("the cancelled pull: {error:?}")),
        }
        others.into_iter().collect::<Check<Vec<_>>>()?;
        let _ = kit.there(driver, reference).await?;
        kit.clears(reference).await?;
    }
    Ok(())
}

pub(super) async fn drop_pull(kit: &Kit<'_>) -> Check {
    let driver: &dyn Image = &*kit.open().await?;
    let reference = &kit.image(0).await;
    let call =
        |cx| -> BoxFuture<'_, _> { Box::pin(async move { driver.pull(&cx, reference).await }) };
    let remade = || -> BoxFuture<'_, Check> {
        Box::pin(async {
            kit.converges(reference).await?;
            kit.clears(reference).await
        })
    };
    kit.run.dropped("pull", nothing, call, remade).await?;
    let cleared = || -> BoxFuture<'_, Check> { Box::pin(kit.clears(reference)) };
    kit.run.dropped("pull", nothing, call, cleared).await
}

pub(super) async fn drop_delete(kit: &Kit<'_>) -> Check {
    let driver: &dyn Image = &*kit.open().await?;
    let reference = &kit.image(0).await;
    let made = || -> BoxFuture<'_, Check> { Box::pin(kit.converges(reference)) };
    let call =
        |cx| -> BoxFuture<'_, _> { Box::pin(async move { driver.delete(&cx, reference).await }) };
    let cleared = || -> BoxFuture<'_, Check> { Box::pin(kit.clears(reference)) };
    kit.run.dropped("delete", made, call, cleared).await?;
    kit.run.dropped("delete", made, call, made).await
}
