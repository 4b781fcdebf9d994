/* Search from file://. A browser refuses to start a Worker from a file, so the site's search runs in a hidden iframe. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.frame = frame
      const inside = frame.contentWindow
      const script = (source) => new Promise((resolve, reject) => {
        const element = inside.document.createElement("script")
        element.src = source
        element.onload = resolve
        element.onerror = () => reject(new Error(`${source} could not be loaded`))
        inside.document.head.appendChild(element)
      })
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      inside.importScripts = (...sources) => Promise.all(sources.map((source) => script(new URL(source, url).href)))
      this.ready = script(url)
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
