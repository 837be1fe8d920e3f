// Search in pages read from the disk: browsers start no workers there, so a hidden frame does the worker's job.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) => Promise.all(urls.map(url => this.load(url)))
      this.load(script).then(() => {
        this.isReady = true
        this.waiting.splice(0).forEach(data => this.postMessage(data))
      })
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const page = this.frame.contentDocument
        const element = page.createElement("script")
        element.src = url
        element.onload = resolve
        element.onerror = reject
        page.body.append(element)
      })
    }

    postMessage(data) {
      if (this.isReady) this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
      else this.waiting.push(data)
    }

    terminate() {
      this.frame.remove()
    }
  }
}
