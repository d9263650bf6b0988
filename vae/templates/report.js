"use strict";
for (const controls of document.querySelectorAll(".controls")) controls.hidden = false;

// One image pixel is one screen pixel; CSS pixels are larger on a scaled display.
function fit() {
  const scale = Number(document.getElementById("zoom").value) / window.devicePixelRatio;
  for (const layer of document.querySelectorAll(".layer")) {
    layer.style.width = layer.getAttribute("width") * scale + "px";
    layer.style.height = layer.getAttribute("height") * scale + "px";
  }
}
document.getElementById("zoom").addEventListener("change", fit);
window.addEventListener("resize", fit);
fit();

for (const image of document.querySelectorAll(".image")) {
  const stack = image.querySelector(".stack");
  const slide = image.querySelector(".slide");
  const layers = image.querySelectorAll(".layer");
  const sides = image.querySelectorAll("select[data-side]");
  const difference = image.querySelector(".difference");

  function move() {
    stack.style.setProperty("--cut", slide.value + "%");
    slide.setAttribute("aria-valuetext", Math.round(slide.value) + " percent " + sides[0].selectedOptions[0].text
      + ", the rest " + sides[1].selectedOptions[0].text);
  }
  function choose() {
    for (const layer of layers) layer.classList.remove("left", "right");
    for (const side of sides) layers[side.value].classList.add(side.dataset.side);
    stack.classList.toggle("differing", difference.checked);
    move();
  }
  slide.addEventListener("input", move);
  for (const control of [...sides, difference]) control.addEventListener("change", choose);
  stack.classList.add("chosen");
  choose();
}
